"""The error of tokenizers and chat templates that cannot be used."""


class TextError(ValueError):
    """A tokenizer or chat template is missing, damaged or refused, or a conversation is malformed; says which."""

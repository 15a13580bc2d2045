"""The tokenizer that lies in or beside a checkpoint."""

from pathlib import Path

from radix_jax.text.errors import TextError
from radix_jax.text.gguf_vocab import load_gguf_tokenizer
from radix_jax.text.hf_folder import load_hf_tokenizer
from radix_jax.text.tokenizer import Tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a .gguf file, of a Hugging Face folder, or of a folder that holds one .gguf file.

    Raises:
        TextError: there is none, or it is damaged or of a kind that isn't built; names the file.
    """
    path = Path(path)
    if path.is_file():
        return load_gguf_tokenizer(path)
    if not path.is_dir():
        raise TextError(f"{path} does not exist; give a .gguf file or a folder with tokenizer.json")
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1 and not (path / "tokenizer.json").is_file():
        return load_gguf_tokenizer(gguf_files[0])
    return load_hf_tokenizer(path)

"""The error of everything that is wrong with a checkpoint or with the way to it."""


class CheckpointError(ValueError):
    """A checkpoint cannot be found, fetched or loaded; the text names the file or tensor and the way out."""

"""Models from the Hugging Face hub, or from its cache (HF_HOME, HF_HUB_OFFLINE are honoured)."""

from pathlib import Path

from radix_jax.checkpoints.errors import CheckpointError

_FOLDER_PATTERNS = ["*.safetensors", "*.json", "chat_template.jinja"]
# Files in sub-folders are of other runtimes; consolidated.* repeats the shards in another naming.
_IGNORED_PATTERNS = ["*/*", "consolidated*"]


def fetch_from_hub(hub_id: str) -> Path:
    """Folder of the files of `hub_id` that this engine reads: safetensors and JSON, or else its one GGUF file.

    Raises:
        CheckpointError: the id isn't in the hub's cache and cannot be fetched, or holds nothing that can be read.
    """
    folder = _snapshot(hub_id, _FOLDER_PATTERNS)
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")) or any(folder.glob("*.gguf")):
        return folder
    gguf_names = _gguf_names(hub_id)
    if len(gguf_names) != 1:
        found = f"{len(gguf_names)} GGUF files ({', '.join(gguf_names)})" if gguf_names else "no GGUF file"
        raise CheckpointError(
            f"hub id {hub_id!r} has no safetensors and {found}; fetch one .gguf file with "
            f"`hf download {hub_id} FILE` and give its path"
        )
    return _snapshot(hub_id, gguf_names)


def fetch_config_from_hub(hub_id: str) -> Path:
    """Folder with the config.json of `hub_id`, if it has one; no weights are fetched.

    Raises:
        CheckpointError: the id isn't in the hub's cache and cannot be fetched.
    """
    return _snapshot(hub_id, ["config.json"])


def _snapshot(hub_id: str, patterns: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=_IGNORED_PATTERNS)
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"hub id {hub_id!r} needs permission: ask for it on its page, then `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"hub id {hub_id!r} does not exist or is private; check the spelling, or `hf auth login`"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(_unreachable(hub_id, error)) from error


def _gguf_names(hub_id: str) -> list[str]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        names = HfApi().list_repo_files(hub_id)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise CheckpointError(_unreachable(hub_id, error)) from error
    return sorted(name for name in names if name.endswith(".gguf") and "/" not in name)


def _unreachable(hub_id: str, error: Exception) -> str:
    """Text for an id that could not be had; `error` says why, often at length: its first line is enough."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"hub id {hub_id!r} is not in the hub's cache and could not be fetched ({reason}); connect to the network "
        "(HF_HUB_OFFLINE unset), or fetch it elsewhere and give the path of the folder or .gguf file"
    )

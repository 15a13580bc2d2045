"""What a model's steps will cost on a target: compile time, memory, work, roofline, and how much KV fits."""

from dataclasses import dataclass
from typing import Any

from radix_jax.aot.compiling import CompiledProgram
from radix_jax.aot.devices import AnyTarget
from radix_jax.aot.kernel_report import KernelReport
from radix_jax.aot.roofline import page_bytes, step_work, tree_bytes
from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.aot.steps import StepSettings, abstract_params, compile_step
from radix_jax.aot.tpu_compiling import TpuProgram
from radix_jax.aot.tpu_report import TpuKernel
from radix_jax.aot.tpu_targets import TpuTarget
from radix_jax.checkpoints import open_checkpoint, resolve_config
from radix_jax.checkpoints.json_file import read_json
from radix_jax.models.registry import family_for_hf_config
from radix_jax.plan import Bucket
from radix_jax.runner.resolve import DEFAULT_MEMORY_FRACTION
from radix_jax.runner.sampler_state import sampler_state_bytes

# Of a GPU's memory jax takes this much at its start, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
JAX_MEMORY_FRACTION = 0.75
OUR_KERNELS = ("combine_kernel", "decode_kernel", "extend_kernel", "write_kernel")


@dataclass(frozen=True)
class StepReport:
    """One step kind, in its largest bucket.

    context_len: tokens of a row in the counts of work. *_bytes: weights_bytes, pool_bytes and sampler_bytes stay on the
    device, temp_bytes are the program's own; moved_bytes is what it has to read and write at least. alias_bytes: of
    pool and sampler, updated in place. roofline_s: the least time; bound: what binds it. kernels: those of ours.
    """

    kind: str
    num_tokens: int
    num_rows: int
    context_len: int
    lower_s: float
    compile_s: float
    weights_bytes: int
    pool_bytes: int
    sampler_bytes: int
    temp_bytes: int
    alias_bytes: int
    moved_bytes: int
    flop: int
    roofline_s: float
    bound: str
    kernels: tuple[KernelReport, ...] | tuple[TpuKernel, ...]


@dataclass(frozen=True)
class ModelReport:
    """A model on a target.

    num_pages: that fit, the null page included, as the engine counts them: in 0.85 of what weights and sampler leave of
        `usable_bytes`; on a TPU with the whole model on one device. kv_tokens, num_requests: what they hold, in tokens
        and in requests of max_model_len.
    """

    model: str
    target: str
    settings: StepSettings
    num_pages: int
    kv_tokens: int
    num_requests: int
    steps: tuple[StepReport, ...]


def model_config(name: str) -> Any:
    """The config of a named shape, a folder with config.json, a .gguf file, a hub id or a built-in model.

    Raises:
        ValueError: no such model.
    """
    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    path = resolve_config(name)
    if path.name == "config.json":
        hf_config = read_json(path)
    else:
        with open_checkpoint(path) as checkpoint:
            hf_config = checkpoint.hf_config
    return family_for_hf_config(hf_config).parse_config(hf_config)


def usable_bytes(target: AnyTarget) -> int:
    """What a process may take of a device's memory: on a GPU what jax takes at its start, on a TPU all that there is
    for programs."""
    return target.usable_bytes if isinstance(target, TpuTarget) else int(target.memory_bytes * JAX_MEMORY_FRACTION)


def report_model(target: AnyTarget, name: str, config: Any, settings: StepSettings, context_len: int) -> ModelReport:
    """Compile the largest decode and prefill step of the model for the target, and count.

    Raises:
        ValueError: the weights leave no room for two pages.
    """
    params = abstract_params(config, settings.dtype)
    memory_bytes, weights_bytes = usable_bytes(target), tree_bytes(params.weights)
    room_bytes = memory_bytes - weights_bytes - _sampler_bytes(params, settings)
    free_bytes = int(room_bytes * DEFAULT_MEMORY_FRACTION)
    bytes_a_page = settings.page_size * _kv_token_bytes(config, settings)
    num_pages = free_bytes // bytes_a_page
    if num_pages < 2:
        raise ValueError(
            f"{name} takes {weights_bytes / 1e9:.1f} GB in {settings.dtype}, of {target.name}'s memory a process takes "
            f"{memory_bytes / 1e9:.1f} GB: no room for 2 pages; take a smaller dtype or another target"
        )
    steps = tuple(_report_step(target, params, bucket, settings, num_pages, context_len) for bucket in settings.largest)
    temp_bytes = max(step.temp_bytes for step in steps)
    num_pages = min(num_pages, max(0, room_bytes - temp_bytes) // bytes_a_page)
    kv_tokens = max(0, num_pages - 1) * settings.page_size
    return ModelReport(name, target.name, settings, num_pages, kv_tokens, kv_tokens // settings.max_model_len, steps)


def _report_step(
    target: AnyTarget, params: Any, bucket: Bucket, settings: StepSettings, num_pages: int, context_len: int
) -> StepReport:
    program = compile_step(target, params, bucket, settings, num_pages)
    # A prefill step computes whole prompts of up to the context's length.
    q_len = 1 if bucket.kind == "decode" else min(bucket.num_tokens, context_len)
    num_rows = bucket.num_rows if bucket.kind == "decode" else bucket.num_tokens // q_len
    row_len = context_len if bucket.kind == "decode" else q_len
    kv_token_bytes = _kv_token_bytes(params.config, settings)
    work = step_work(params, num_rows=num_rows, q_len=q_len, context_len=row_len, kv_token_bytes=kv_token_bytes)
    roofline_s, bound = work.seconds(target)
    return StepReport(
        kind=bucket.kind,
        num_tokens=bucket.num_tokens,
        num_rows=num_rows,
        context_len=row_len,
        lower_s=round(program.lower_s, 2),
        compile_s=round(program.compile_s, 2),
        weights_bytes=tree_bytes(params.weights),
        pool_bytes=num_pages * settings.page_size * kv_token_bytes,
        sampler_bytes=_sampler_bytes(params, settings),
        temp_bytes=program.temp_bytes,
        alias_bytes=program.alias_bytes,
        moved_bytes=work.weights_bytes + work.kv_bytes,
        flop=work.matmul_flop + work.attention_flop,
        roofline_s=roofline_s,
        bound=bound,
        kernels=_our_kernels(program),
    )


def _sampler_bytes(params: Any, settings: StepSettings) -> int:
    return sampler_state_bytes(settings.max_running_requests, params.config.vocab_size)


def _kv_token_bytes(config: Any, settings: StepSettings) -> int:
    return page_bytes(config, 1, settings.kv_dtype, settings.attention_backend)


def _our_kernels(program: CompiledProgram | TpuProgram) -> tuple[KernelReport, ...] | tuple[TpuKernel, ...]:
    if isinstance(program, TpuProgram):
        return program.kernels
    return tuple(kernel for kernel in program.kernels if kernel.name in OUR_KERNELS)

"""Memory is given back on close, and a signal in the midst of generating ends the program with nothing left behind."""

import dataclasses
import gc
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from tiny import SMALL, TINY, dense_greedy, greedy
from tiny_llm import write_folder

from radix_jax import LLM

pytestmark = pytest.mark.usefixtures("usual_interrupts")

PROMPT = [1, 2, 3, 4, 5]
# Long enough that a signal always comes in its midst.
ENDLESS = dataclasses.replace(TINY, max_position_embeddings=100_000)


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


@pytest.mark.parametrize("tied", [False, True])
def test_build_generate_close_and_build_again(tmp_path: Path, tied: bool) -> None:
    folder = write_folder(tmp_path, dataclasses.replace(TINY, tie_word_embeddings=tied))
    before = live_bytes()
    outputs = []
    for _ in range(2):
        llm = LLM(folder, **SMALL)
        outputs.append(llm.generate(PROMPT, greedy(4))[0].outputs[0].token_ids)
        used = live_bytes() - before
        assert used >= sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.params)) + llm.engine.runner.kv.nbytes
        llm.close()
        # The LLM itself is kept, and may not keep its params or its pool.
        assert live_bytes() - before <= 0.05 * used
        assert llm.engine is not None
    assert outputs[0] == outputs[1]
    if not tied:
        assert outputs[0] == dense_greedy(PROMPT, 4)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("sent", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_program(tmp_path: Path, sent: signal.Signals, exit_code: int) -> None:
    folder = write_folder(tmp_path, ENDLESS)
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "radix_jax", "generate", "a", "--model", str(folder)]
    options = ["--max-tokens", "90000", "--ignore-eos", "--max-running-requests", "1", "--max-prefill-tokens", "64"]
    # On a terminal the text is streamed, so the first of it tells that generating has begun.
    process = subprocess.Popen(
        [*command, *options],
        stdin=subprocess.DEVNULL,
        stdout=secondary,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(secondary)
    try:
        assert os.read(primary, 1)
        process.send_signal(sent)
        _, errors = process.communicate(timeout=10)
    finally:
        process.kill()
        os.close(primary)
    assert process.returncode == exit_code
    assert b"Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)

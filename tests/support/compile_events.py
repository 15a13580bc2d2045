"""What JAX traces, lowers and compiles while a block runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def compile_events() -> Iterator[list[str]]:
    """The names of such events, as they come."""
    events: list[str] = []

    def note(event: str, _: float, **__: object) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(note)

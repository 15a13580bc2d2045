"""Logical axes to mesh axes. One device is a mesh of one, so that there is one code path."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The mesh has one axis, "tensor", over which heads, feed-forward and vocabulary are split.
MESH_AXIS = "tensor"
LOGICAL_AXES: dict[str, str | None] = {
    "kv": MESH_AXIS,  # pool lanes, W: whole kv heads
    "replicated": None,
}


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the given devices; by default the first one alone."""
    return Mesh(np.array(devices if devices is not None else jax.local_devices()[:1]), (MESH_AXIS,))


def named_sharding(mesh: Mesh, *logical_axes: str) -> NamedSharding:
    """Sharding of an array whose axes have these logical names.

    Raises:
        KeyError: a name that LOGICAL_AXES does not have.
    """
    return NamedSharding(mesh, PartitionSpec(*(LOGICAL_AXES[name] for name in logical_axes)))

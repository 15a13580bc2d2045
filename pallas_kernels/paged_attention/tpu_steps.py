"""The order in which the decode kernel's parts are written down, one after the other.

The compiler schedules a straight run of code and looks ahead by so much only: what it finds first depends on the order
of the text. Two things count. The scores of a slab have to be far ahead of its softmax, whose maximum and exponentials
take long, and matmuls must be at hand meanwhile: those of other slabs' scores, which need K transposed on the way into
the matmul unit and take twice as long as those of V. And copies are started between them, a few at a time, as each is a
string of scalar instructions that fits beside matmuls.

Counted on a v5e, 8 kv heads of 128, 512 tokens a tile, new token written: this order 759 bundles an item, the plain one
(all scores, then softmax and values slab by slab) 813, slab by slab throughout 931.
"""

# The copies of the next tile are started in this many portions.
NUM_COPY_STEPS = 4
# Slabs whose scores are computed before the softmax of the first.
AHEAD = 3
Step = tuple[str, int]
# Found by exchanging single parts and keeping what counts no worse.
_FOUR_SLABS = (
    "scores_low 1, scores_low 0, scores_high 0, scores_high 1, copies 3, copies 0, record 0, scores_low 2, softmax 0, "
    "copies 2, scores_low 3, scores_high 2, scores_high 3, copies 1, values_low 0, values_high 0, softmax 1, "
    "values_low 1, softmax 2, values_high 1, write 0, values_low 2, softmax 3, values_high 2, values_low 3, "
    "values_high 3"
)


def decode_steps(num_slabs: int) -> tuple[Step, ...]:
    """(part, index) in order; index is a slab, a portion of the copies, or 0."""
    if num_slabs == 4:
        return tuple((name, int(index)) for name, index in (step.split() for step in _FOUR_SLABS.split(", ")))
    steps: list[Step] = []
    for slab in range(num_slabs + AHEAD):
        if slab < num_slabs:
            steps += [("scores_low", slab), ("scores_high", slab)]
        if slab == 0:
            steps += [("record", 0), *(("copies", index) for index in range(NUM_COPY_STEPS))]
        if slab == num_slabs:
            steps.append(("write", 0))
        if 0 <= slab - AHEAD < num_slabs:
            steps += [(part, slab - AHEAD) for part in ("softmax", "values_low", "values_high")]
    return tuple(steps)

"""The order in which the decode kernel's parts are written down, one after the other.

The compiler schedules a straight run of code and looks ahead by so much only: what it finds first depends on the order
of the text. Two things count. The scores of a slab have to be far ahead of its softmax, whose maximum and exponentials
take long, and matmuls must be at hand meanwhile. And copies are started between them, a few at a time, as each is a
string of scalar instructions that fits beside matmuls.
"""

# The copies of the next tile are started in this many portions.
NUM_COPY_STEPS = 4
# Slabs whose scores are computed before the softmax of the first.
AHEAD = 3
Step = tuple[str, int]
# Found by exchanging single parts and keeping what counts no worse, for 8 kv heads of 128 in tiles of 512.
_FOUR_SLABS = (
    "scores_low 1, scores_high 0, scores_low 0, scores_high 1, scores_low 2, copies 0, scores_high 2, copies 3, "
    "copies 2, softmax 0, record 0, scores_high 3, write 0, scores_low 3, softmax 2, values_low 0, values_high 0, "
    "softmax 1, values_low 1, values_high 1, values_low 2, softmax 3, values_low 3, values_high 2, values_high 3, "
    "copies 1"
)


def decode_steps(num_slabs: int, mxu_size: int) -> tuple[Step, ...]:
    """(part, index) in order; index is a slab, a portion of the copies, or 0.

    mxu_size: matmul units of 256 rows are best kept busy by all scores at once; smaller ones, which are more, take as
    long for the scores of a slab as its softmax does.
    """
    if mxu_size >= 256:
        return _scores_first(num_slabs)
    if num_slabs == 4:
        return tuple((name, int(index)) for name, index in (step.split() for step in _FOUR_SLABS.split(", ")))
    return _by_turns(num_slabs)


def _scores_first(num_slabs: int) -> tuple[Step, ...]:
    steps = [*_scores(0), ("record", 0), *(("copies", index) for index in range(NUM_COPY_STEPS))]
    for slab in range(1, num_slabs):
        steps += _scores(slab)
    steps.append(("write", 0))
    for slab in range(num_slabs):
        steps += [("softmax", slab), ("values_low", slab), ("values_high", slab)]
    return tuple(steps)


def _by_turns(num_slabs: int) -> tuple[Step, ...]:
    steps: list[Step] = []
    for slab in range(min(AHEAD, num_slabs)):
        steps += _scores(slab)
    steps += [("copies", 0), ("record", 0), ("copies", 1), ("copies", 2), ("softmax", 0)]
    for slab in range(num_slabs):
        if slab + AHEAD < num_slabs:
            steps += _scores(slab + AHEAD)
        if slab == num_slabs - 1:
            steps.append(("write", 0))
        steps.append(("values_low", slab))
        if slab + 1 < num_slabs:
            steps.append(("softmax", slab + 1))
        steps.append(("values_high", slab))
    return (*steps, ("copies", 3))


def _scores(slab: int) -> list[Step]:
    return [("scores_low", slab), ("scores_high", slab)]

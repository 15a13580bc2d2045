"""An RL loop in one process: sample with the weights of now, train them, and go on with the new ones, uncopied.

python examples/update_weights.py
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tiny_model import CONFIG, SETTINGS

from radix_jax import Engine, EngineConfig, Rollouts, SamplingParams
from radix_jax.models.llama import Llama

GRAPH, START = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(0)), nnx.Param)
PROMPTS = [[10, 20, 30, i] for i in range(8)]
LEARNING_RATE = 1.0


def rewards_of(rollouts: Rollouts) -> jax.Array:
    """[R]: the share of even ids in each output."""
    even = (rollouts.token_ids % 2 == 0) & rollouts.output_mask
    return even.sum(1) / jnp.asarray(rollouts.output_mask).sum(1)


@jax.jit
def train_step(weights: nnx.State, rollouts: Rollouts) -> Any:
    """A step along the policy gradient, with the mean reward as baseline: the trainer, which knows no engine."""
    advantages = rewards_of(rollouts) - rewards_of(rollouts).mean()
    ids = jnp.asarray(rollouts.token_ids)

    def loss(weights: nnx.State) -> jax.Array:
        logits = jax.vmap(nnx.merge(GRAPH, weights))(ids)
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], ids[:, 1:, None], axis=-1)
        return -(logprobs[..., 0] * rollouts.output_mask[:, 1:] * advantages[:, None]).sum() / len(advantages)

    return jax.tree.map(lambda leaf, slope: leaf - LEARNING_RATE * slope, weights, jax.grad(loss)(weights))


def main() -> None:
    """Rounds of sampling and training; the rollouts say which weights they are of."""
    weights, engine = START, Engine(CONFIG, START, EngineConfig(**SETTINGS))
    for number in range(5):
        rollouts = engine.rollout(PROMPTS, SamplingParams(max_tokens=8, seed=1000 * number), n=8)
        versions = rollouts.weight_versions[rollouts.output_mask]
        reward = float(rewards_of(rollouts).mean())
        print(f"round {number}: weights {versions.min()} to {versions.max()}, reward {reward:.2f}")
        engine.sleep()  # the pool's memory is the trainer's while it works
        weights = train_step(weights, rollouts)
        engine.update_params(weights)
        engine.wake()


if __name__ == "__main__":
    main()

"""The command radix-jax check-kernel."""

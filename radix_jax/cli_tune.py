"""The command radix-jax tune."""

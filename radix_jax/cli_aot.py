"""The command radix-jax aot."""

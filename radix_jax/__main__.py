"""`python -m radix_jax` is the command line."""

from radix_jax.cli import main

if __name__ == "__main__":
    main()

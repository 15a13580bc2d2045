"""Model families: configs, Flax NNX modules, and the pure forward over their leaves."""

"""Tier cpu: runs on the CPU also where there is a GPU."""

import jax

jax.config.update("jax_platforms", "cpu")

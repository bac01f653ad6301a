"""The benchmark of training steps: the same losses whoever computes the attention, and no time for a wrong one."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks import training
from benchmarks.training import Row

GOOD = Row(64, "rows", "jattn", "forward by cpu", 1.0, 0.1, 1e6, (5.5, 5.0))


def test_a_time_counts_only_beside_equal_losses() -> None:
    judge = dataclasses.replace(GOOD, contender="jax-xla")
    assert training.judged(GOOD, judge, 1e-4) == GOOD
    late = training.judged(GOOD, dataclasses.replace(judge, losses=(5.5, 5.1)), 1e-4)
    assert late.median_ms is None
    assert late.note.startswith("wrong: losses up to 1.0e-01 nats")
    alone = training.judged(GOOD, None, 1e-4)
    assert alone.median_ms is None
    assert "not compared" in alone.note


def test_contenders_learn_the_same() -> None:
    demo = training.load_demo()
    sizes = {"batch": 2, "seq_len": 64, "layers": 1, "heads": 2, "head_dim": 16, "steps": 3}
    fixed = {"compare_steps": 3, "learning_rate": 1e-3, "dropout": 0.0, "dtype": "float32"}
    config = demo.Config(**sizes, **fixed, seed=0, implementation=None, mesh="1x1")
    data = demo.pack(demo.read_documents(20_000), 64)
    ours, theirs = (
        training.time_steps(demo, config, name, "documents", data) for name in ("jattn", "jax-xla")
    )
    assert ours.backends == "forward by cpu, backward by cpu"
    assert len(ours.losses) == 3
    assert training.judged(ours, theirs, config.loss_tolerance) == ours
    np.testing.assert_allclose(ours.losses, theirs.losses, atol=config.loss_tolerance)

"""What tests and benchmarks share: named problems, their inputs, the float64 oracle, and the comparison.

`cases` names the problems, `inputs` makes their arrays, `oracle` solves them in numpy, `compare` judges a result,
`run` puts a case through one backend and proves that this backend ran.
"""

from jattn.testing import cases, compare, inputs, oracle

__all__ = ["cases", "compare", "inputs", "oracle"]

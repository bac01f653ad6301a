"""jattn: exact attention for JAX with hand-written kernels for NVIDIA GPUs and CPUs.

``jattn.dot_product_attention`` is a superset of ``jax.nn.dot_product_attention``. ``jattn.explain`` says which
backend runs a call and why; docs/conventions.md has the numeric conventions.
"""

from jattn._version import __version__ as __version__
from jattn.api import dot_product_attention as dot_product_attention
from jattn.autodiff import checkpoint_policy as checkpoint_policy
from jattn.backends.base import Backend as Backend
from jattn.backends.base import Residuals as Residuals
from jattn.backends.base import Wants as Wants
from jattn.block_mask import BlockMask as BlockMask
from jattn.block_mask import create_block_mask as create_block_mask
from jattn.config import deterministic as deterministic
from jattn.config import sdpa_kernel as sdpa_kernel
from jattn.config import set_enabled as set_enabled
from jattn.config import strict_fallback as strict_fallback
from jattn.config import target_device as target_device
from jattn.counters import call_counters as call_counters
from jattn.counters import reset_call_counters as reset_call_counters
from jattn.device import Device as Device
from jattn.dispatch import register_backend as register_backend
from jattn.dispatch import unregister_backend as unregister_backend
from jattn.dropout import dropout_mask as dropout_mask
from jattn.dropout import seed_from_key as seed_from_key
from jattn.errors import FallbackWarning as FallbackWarning
from jattn.errors import NoBackendError as NoBackendError
from jattn.errors import Reason as Reason
from jattn.explanation import Explanation as Explanation
from jattn.explanation import FunctionExplanation as FunctionExplanation
from jattn.explanation import explain as explain
from jattn.explanation import select_backend as select_backend
from jattn.ffi import export_disabled_checks as export_disabled_checks
from jattn.ffi import register_targets as _register_targets
from jattn.fusion import FusionRecord as FusionRecord
from jattn.fusion import clear_fusion_log as clear_fusion_log
from jattn.fusion import fuse_attention as fuse_attention
from jattn.fusion import fusion_log as fusion_log
from jattn.masks import CausalBias as CausalBias
from jattn.masks import causal_lower_right as causal_lower_right
from jattn.masks import causal_upper_left as causal_upper_left
from jattn.ragged import RaggedArray as RaggedArray
from jattn.ragged import is_left_aligned as is_left_aligned
from jattn.ragged_attention import flash_mha_varlen as flash_mha_varlen
from jattn.ragged_attention import ragged_dot_product_attention as ragged_dot_product_attention

# Programs exported elsewhere name our targets; importing jattn is all they ask for. Starts no JAX backend.
_register_targets()

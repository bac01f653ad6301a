"""Attention that programs write by hand, found and replaced."""

from jattn.fusion.rewriting import FusionRecord as FusionRecord
from jattn.fusion.rewriting import clear_fusion_log as clear_fusion_log
from jattn.fusion.rewriting import fuse_attention as fuse_attention
from jattn.fusion.rewriting import fusion_log as fusion_log

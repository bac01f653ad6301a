"""NVRTC compiles every kernel family and element from the headers inside the module, and says what is wrong."""

import pytest
import resources
import toolchain

from jattn import _core

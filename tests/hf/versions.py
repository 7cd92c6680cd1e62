"""Tests that hold with some versions of other packages only."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

from vasuki.machines.here.gpu import torch_pages, torch_version

OTHER_MODELS = torch_version() < (2, 12)  # are drawn at random there, whose rows end elsewhere
PAGES = pytest.mark.skipif(not torch_pages(), reason="this torch's packed attention walks no pages")
WIDENS_COMPRESSED = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="compressed-tensors itself widens them"
)
GUARDS_NAMES = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="templates may keep names that begin with an underscore"
)

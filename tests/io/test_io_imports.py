from __future__ import annotations

import subprocess
import sys


def test_the_room_needs_no_model_library() -> None:
    code = """
import sys, vasuki.io.output.sink, vasuki.io.output.output_folder, vasuki.io.output.trace
print([name for name in ("torch", "transformers", "tokenizers") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

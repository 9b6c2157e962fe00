"""Makes the helpers beside these tests importable; golden trees are packages of their own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = ["golden"]

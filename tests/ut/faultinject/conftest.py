"""Puts the toy worker beside these tests on the path, also for the pytest runs that they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

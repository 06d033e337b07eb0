"""`python -m asyncrl_servers.embedded.trial`: check the model of the spec on standard
input as at a start, and end.
"""

from __future__ import annotations

import sys

from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.embedded_engine import build_engine

if __name__ == "__main__":
    build_engine(EmbeddedSpec.model_validate_json(sys.stdin.read()))

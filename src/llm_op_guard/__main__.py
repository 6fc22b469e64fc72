"""`python -m llm_op_guard`: the same as the command `llm-op-guard`."""

import sys

from llm_op_guard.cli import main

sys.exit(main())

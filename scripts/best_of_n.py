"""The same as `jaxrl-lm search`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["search", *sys.argv[1:]])

"""The same as `jaxrl-lm generate`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["generate", *sys.argv[1:]])

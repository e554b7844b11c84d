"""The command line. Light by rule: ``tela --help`` and ``tela status`` load click and msgspec, and nothing heavy."""

from scripts.generate_reference import FILES, stale


def test_generated_reference_is_what_the_code_says():
    assert stale() == [], "run python scripts/generate_reference.py"


def test_commands_reference_names_options_and_defaults():
    text = FILES["cli.md"]()
    assert "## tela invite create" in text
    assert "tela join [OPTIONS] [INVITE] -- ENGINE COMMAND..." in text
    assert "`--engine-port INTEGER`" in text
    assert "`--verbose, -v`" in text
    assert "TELA_ENGINE__START_TIMEOUT" in FILES["settings.md"]()
    assert "| `tela_ingress_requests_total` | counter | `model`, `status` |" in FILES["metrics.md"]()

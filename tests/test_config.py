import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.config import (
    EngineSettings,
    Settings,
    engine_options,
    load_settings,
    parse_duration,
    parse_host_port,
    setting_keys,
    variable_of,
)
from tela.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("12h", 43_200),
        ("30d", 2_592_000),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("7", 7),
        (" 1.5H ", 5400),
    ],
)
def test_parse_duration_of_what_people_write(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-5s", "5y", "5 s x", "1m2", "inf", "nan", "1e3", "٣s", "5ss"])
def test_parse_duration_of_anything_else_says_how(text):
    with pytest.raises(ValueError, match="write it as 90s"):
        parse_duration(text)


@given(st.integers(0, 10**6), st.sampled_from(["s", "m", "h", "d"]))
def test_parse_duration_is_linear_in_its_number(number, unit):
    assert parse_duration(f"{number}{unit}") == number * parse_duration(f"1{unit}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:8080", ("127.0.0.1", 8080)), ("[::1]:80", ("::1", 80)), ("node.example:0", ("node.example", 0))],
)
def test_parse_host_port(text, expected):
    assert parse_host_port(text) == expected


@pytest.mark.parametrize(
    "text", ["", "8080", ":8080", "host", "host:", "host:x", "host:65536", "::1:80", "host:-1", "host:٣"]
)
def test_parse_host_port_of_another_form_says_how(text):
    with pytest.raises(ValueError, match=r"write it as 127\.0\.0\.1:8080"):
        parse_host_port(text)


def test_load_settings_without_any_layer_gives_defaults():
    assert load_settings({}, {}) == (Settings(), ())


def test_load_settings_layers_each_override_the_one_below(tmp_path):
    user = tmp_path / "config" / "tela" / "tela.toml"
    user.parent.mkdir(parents=True)
    user.write_text('drain = "1s"\nname = "user"\nhttp = "h:1"\n[engine]\nrestart = 1\nport = 1\n')
    (tmp_path / "tela.toml").write_text('drain = "2s"\nname = "project"\n[engine]\nrestart = 2\n')
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "TELA_DRAIN": "3s", "TELA_ENGINE__HEALTH_PATH": "/up"}
    settings, warnings = load_settings({"drain": "4s", "http": None, "engine__canary": False}, environ)
    assert settings == Settings(
        drain=4, name="project", http="h:1", engine=EngineSettings(restart=2, port=1, health_path="/up", canary=False)
    )
    assert warnings == ()


def test_load_settings_from_a_named_file_reads_no_other(tmp_path):
    (tmp_path / "tela.toml").write_text('name = "project"\n')
    (tmp_path / "mine.toml").write_text('listen = ["a:1"]\n')
    by_flag, _ = load_settings({}, {}, config_file=tmp_path / "mine.toml")
    by_variable, _ = load_settings({}, {"TELA_CONFIG": str(tmp_path / "mine.toml")})
    assert by_flag == by_variable == Settings(listen=("a:1",))


def test_load_settings_reads_lists_and_booleans_of_the_environment():
    settings, _ = load_settings({}, {"TELA_LISTEN": "a:1,b:2", "TELA_ENGINE__CANARY": "false"})
    assert settings.listen == ("a:1", "b:2")
    assert settings.engine.canary is False


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"nope": 1}, {}, "command line: .*`nope`"),
        ({"http": "abc"}, {}, "command line: http: 'abc' is no address"),
        ({"drain": "3y"}, {}, r"command line: '3y' is no duration.*`\$\.drain`"),
        ({}, {"TELA_ENGINE__PORT": "x"}, r"environment: .*`\$\.engine\.port`"),
        ({}, {"TELA_ENGINE__PORT": "70000"}, "environment: port: 70000"),
        ({}, {"TELA_ENGINE__RESTART": "-1"}, "environment: restart: -1"),
        ({"proxy": "ftp://h:1"}, {}, "command line: proxy: proxies of kind 'ftp'"),
        ({}, {"TELA_LOG_LEVEL": "loud"}, "environment: log_level: 'loud'"),
    ],
)
def test_load_settings_names_layer_and_key_of_a_bad_value(flags, environ, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(flags, environ)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = 1", "tela.toml: .*`x`"),
        ("x = ", "is not TOML"),
        ("[engine]\nport = 'a'", r"tela.toml: .*engine\.port"),
        ("engine = 1", "tela.toml: .*engine"),
    ],
)
def test_load_settings_names_the_file_that_is_wrong(tmp_path, content, message):
    (tmp_path / "tela.toml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_settings({}, {})


def test_load_settings_from_a_file_that_is_missing_or_huge_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings({}, {}, config_file=tmp_path / "missing.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(ConfigError, match="longer than"):
        load_settings({}, {}, config_file=tmp_path / "huge.toml")


def test_load_settings_warns_of_a_variable_that_is_no_setting():
    _, warnings = load_settings({}, {"TELA_DRAIM": "3s", "TELA_INVITE": "x", "PATH": "/bin"})
    assert len(warnings) == 1
    assert "TELA_DRAIM" in warnings[0]


@pytest.mark.parametrize("key", list(setting_keys()))
def test_every_setting_is_read_from_its_variable(key):
    text = {
        "name": "n",
        "log_level": "debug",
        "engine__canary": "0",
        "allow_any": "1",
        "engine__health_path": "/h",
        "labels": "rack=12",
    }.get(key, "5")
    text = "h:5" if key in {"listen", "advertise", "http", "proxy"} else "10.0.0.0/8" if key == "exclude_cidr" else text
    settings, warnings = load_settings({}, {variable_of(key): text})
    assert settings != Settings()
    assert warnings == ()


def test_engine_options_carry_the_command_untouched():
    argv = ("vllm", "serve", "--", "a b", "{port}")
    options = engine_options(EngineSettings(port=5, canary=False), argv)
    assert options.argv == argv
    assert (options.engine_port, options.is_canary, options.start_timeout_s) == (5, False, 1800.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"price": -1.0}, "price"),
        ({"price": float("inf")}, "price"),
        ({"tier": "x" * 200}, "tier"),
        ({"contact": "a\nb"}, "contact"),
        ({"labels": ("rack",)}, "rack=12"),
        ({"labels": tuple(f"k{n}=v" for n in range(17))}, "too many"),
    ],
)
def test_words_that_others_could_not_take_in_are_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(flags, {})


def test_words_come_from_files_and_environment_alike() -> None:
    settings, _ = load_settings({}, {"TELA_LABELS": "rack=12,row=3", "TELA_PRICE": "2.5", "TELA_CONTACT": "ops"})
    assert (settings.labels, settings.price, settings.contact) == (("rack=12", "row=3"), 2.5, "ops")

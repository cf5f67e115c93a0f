"""The hosts file: both forms, errors that name the place, atomic writing."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.hosts.file import dump_hosts, load_hosts, parse_hosts, save_hosts, split_address
from distributed.hosts.foreign_formats import refuse_foreign
from distributed.hosts.schema import Hosts, Machine
from distributed.ssh import errors as ssh_errors
from distributed.ssh.config import ResolvedHost, SshTarget
from distributed.ssh.login_history import note_login
from profiles.errors import BadInput, ExitCode

PLAIN = {
    "master": "studio.local",
    "workers": ["mac-mini.local", "bob@gpu-box:2222"],
    "ssh_user": "ada",
    "ssh_key_path": "~/.ssh/id_cluster",
    "python_env": "~/venv",
    "project_path": "~/muster",
}


def refused(text: str) -> BadInput:
    with pytest.raises(BadInput) as caught:
        parse_hosts(text, "h.json")
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert "\n" not in str(caught.value)
    assert caught.value.message.startswith("h.json")
    return caught.value


def test_plain_form_becomes_long_one() -> None:
    hosts = parse_hosts(json.dumps(PLAIN))
    assert [m.name for m in hosts.machines] == ["studio.local", "mac-mini.local", "gpu-box"]
    assert [m.user for m in hosts.machines] == ["ada", "ada", "bob"]
    assert hosts.machines[2].port == 2222
    assert hosts.master.key == "~/.ssh/id_cluster"
    assert hosts.master.python_command == "~/venv/bin/python"


def test_a_name_that_is_typed_is_the_machine_of_the_usual_hosts_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    barn = {"name": "barn", "address": "10.0.0.3", "port": 2222}
    Path("distributed_hosts.json").write_text(json.dumps({"machines": [barn], "ssh_config": "conf"}))
    hosts = load_hosts(Path("box,Barn"))
    assert [machine.endpoint for machine in hosts.machines] == [("box", 22), ("10.0.0.3", 2222)]
    assert (hosts.machines[1].name, hosts.ssh_config) == ("barn", "conf")
    assert load_hosts(Path("ada@barn")).machines[0].address == "barn"
    with pytest.raises(BadInput, match="are the same machine"):
        load_hosts(Path("barn,10.0.0.3:2222"))


def test_a_name_that_leads_nowhere_is_the_machine_that_let_us_in_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def let_in(name: str, host: str, key: str, port: int = 22) -> None:
        note_login(SshTarget(name, host), ResolvedHost(name, host, port, "ada"), "10.0.0.1", key, "")

    let_in("larder.invalid", "10.0.0.4", "SHA256:l", 2222)
    hosts = load_hosts(Path("nobody@10.9.9.9,Larder.invalid"))
    assert (hosts.machines[1].name, hosts.machines[1].login) == ("Larder.invalid", "ada@10.0.0.4:2222")
    assert load_hosts(Path("bob@larder.invalid")).master.login == "bob@10.0.0.4:2222"
    with pytest.raises(BadInput, match="are the same machine"):
        load_hosts(Path("larder.invalid,10.0.0.4:2222"))
    let_in("larder.invalid", "10.0.0.6", "SHA256:another")
    with pytest.raises(BadInput, match=r"2 machines that let Muster in: 10.0.0.\d, 10.0.0.\d \("):
        load_hosts(Path("larder.invalid"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: ["it is in DNS"])
    assert load_hosts(Path("larder.invalid")).master.address == "larder.invalid"


def test_long_form_keeps_every_field_and_puts_the_master_first() -> None:
    b = {
        "name": "b",
        "address": "fe80::1%en0",
        "port": 22,
        "user": "u",
        "key": "k",
        "python": "/usr/bin/python3",
        "project_path": "p",
        "data": "/Volumes/voices",
        "devices": ["cuda:0", "cpu"],
        "interface": "en0",
        "be_polite": True,
        "carries_coordinator": True,
        "found_at": "10.0.0.9",
        "coordinator_at": "10.0.0.1",
    }
    hosts = parse_hosts(json.dumps({"master": "b", "machines": ["a", b], "ssh_config": "~/c"}))
    assert hosts.master.model_dump(mode="json") == b
    assert hosts.machine("A").host == "a"
    assert hosts.ssh_config == "~/c"
    assert hosts.master.python_command == "/usr/bin/python3"


def test_entries_of_both_kinds_share_the_defaults() -> None:
    hosts = parse_hosts('{"master": {"name": "m", "address": "10.0.0.1"}, "workers": ["w"], "ssh_user": "ada"}')
    assert [(m.host, m.user) for m in hosts.machines] == [("10.0.0.1", "ada"), ("w", "ada")]


def test_null_means_not_given() -> None:
    assert parse_hosts('{"master": "a", "workers": null, "ssh_user": null}').machines == (Machine(name="a"),)


@pytest.mark.parametrize(("entry", "here"), [("localhost", True), ("::1", True), ("127.0.0.1:2222", False)])
def test_this_machine_is_recognised(entry: str, here: bool) -> None:
    assert parse_hosts(json.dumps({"master": entry})).master.is_local is here


def test_missing_comma_points_at_the_line_that_lacks_it() -> None:
    error = refused('{\n  "master": "a",\n  "workers": ["b", "c"]\n  "ssh_user": "ada"\n}\n')
    assert error.message.startswith("h.json:3:24: ")
    assert 'a comma or a closing bracket is missing here: "workers": ["b", "c"]' in error.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "1:1: the file is empty"),
        ("[]", "expected an object"),
        ("{}", "names no machine"),
        ('{"master": "a", "wokers": []}', "unknown key 'wokers'"),
        ('{"machines": [{"name": "a", "adress": "b"}]}', "machine 1 ('a'): unknown key 'adress'"),
        ('{"machines": [{"name": "a", "port": "22"}]}', "'port' must be a number from 1 to 65535, not '22'"),
        ('{"machines": [{"name": "a", "port": 70000}]}', "'port' must be a number"),
        ('{"machines": [{"address": "-oProxyCommand=x"}]}', "'address' must be a host name"),
        ('{"master": "a:99999"}', "'port' must be a number"),
        ('{"machines": [{"name": "../up"}]}', "'name' must be a name without slashes"),
        ('{"machines": [{"name": "a\\u001b[2J"}]}', "'name' must be a name without slashes"),
        ('{"machines": [{"name": "a", "devices": ["gpu"]}]}', "'devices' must be a list"),
        ('{"machines": [{"name": "a", "devices": ["cuda:1", "cuda:1"]}]}', "'devices' names cuda:1 twice"),
        ('{"machines": [{"name": "a", "devices": ["cuda", "cpu", "cuda:0"]}]}', "'devices' names cuda:0 twice"),
        ('{"master": "a", "workers": ["b", "A"]}', "machines 1 and 3 share a name"),
        ('{"machines": [{"name": "a", "address": "H"}, {"name": "b", "address": "h", "port": 22}]}', "same machine"),
        ('{"master": "a", "master": "b"}', "'master' appears twice"),
        ('{"master": "c", "machines": ["a", "b"]}', "master 'c' is not among"),
        ('{"machines": ["a"], "workers": ["b"]}', "both 'machines' and 'workers'"),
        ('{"master": "a", "workers": "b"}', "'workers' must be a list"),
        ('{"master": "a", "ssh_user": 5}', "'ssh_user' must be one line of text"),
        ('{"master": 7}', "machine 1: expected a name or an object"),
        ("[" * 100_000, "not a hosts file"),
    ],
)
def test_bad_files_are_refused_in_one_line(text: str, said: str) -> None:
    assert said in refused(text).message


def test_an_unknown_key_names_the_nearest() -> None:
    assert refused('{"master": "a", "ssh_usr": "x"}').hint == "did you mean 'ssh_user'?"


def test_machines_on_one_address_but_two_ports_are_two() -> None:
    assert len(parse_hosts('{"machines": ["h:1", {"name": "b", "address": "h", "port": 2}]}').machines) == 2


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such hosts file"):
        load_hosts(tmp_path / "none.json")
    with pytest.raises(BadInput, match="directory"):
        load_hosts(tmp_path)
    (tmp_path / "b").write_bytes(b'{"master": "\xff"}')
    with pytest.raises(BadInput, match="not a text file"):
        load_hosts(tmp_path / "b")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.mkdir()
    with pytest.raises(BadInput):
        save_hosts(Hosts(machines=(Machine(name="a"),)), path)
    assert os.listdir(tmp_path) == ["hosts.json"]


def test_unknown_machine_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean 'studio'"):
        parse_hosts('{"machines": ["studio", "mini"]}').machine("studo")


def test_example_file_is_readable() -> None:
    example = Path(__file__).parents[2] / "distributed_hosts.json.example"
    assert len(load_hosts(example).machines) >= 2


words = st.text("abcdefghij0123456789-", min_size=1, max_size=12).filter(lambda word: word[0] != "-")
lines = st.text(st.characters(blacklist_categories=("Cc", "Cs")), max_size=20)
machines = st.builds(
    Machine,
    name=words,
    address=st.just("") | words,
    port=st.none() | st.integers(1, 65535),
    user=st.just("") | words,
    key=lines,
    python=lines,
    project_path=lines,
    devices=st.lists(st.sampled_from(["auto", "cpu", "mps", "cuda:1"]), max_size=3, unique=True),
    interface=st.just("") | words,
)
clusters = st.lists(machines, min_size=1, max_size=5, unique_by=(lambda m: m.name, lambda m: (m.host, m.port or 22)))


@settings(max_examples=40)
@given(clusters, lines)
def test_what_is_written_is_read_back(listed: list[Machine], ssh_config: str) -> None:
    hosts = Hosts(machines=tuple(listed), ssh_config=ssh_config)
    assert parse_hosts(dump_hosts(hosts)) == hosts


@settings(max_examples=40)
@given(words, st.none() | words, st.none() | st.integers(1, 65535))
def test_addresses_split_as_they_were_put_together(host: str, user: str | None, port: int | None) -> None:
    text = (f"{user}@" if user else "") + host + (f":{port}" if port else "")
    assert split_address(text) == {"name": host, "user": user, "port": port}


@given(st.integers(1, 65535))
def test_ipv6_addresses_take_a_port_in_brackets(port: int) -> None:
    assert split_address(f"u@[fe80::1%en0]:{port}") == {"name": "fe80::1%en0", "user": "u", "port": port}
    assert split_address("fe80::1%en0") == {"name": "fe80::1%en0", "user": None, "port": None}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
keys = st.sampled_from(["master", "workers", "machines", "ssh_user", "ssh_config", "name", "port"])


def outcome(text: str) -> str:
    """What a person is told, or nothing for a file that can be used."""
    try:
        return "" if parse_hosts(text).machines else "no machines"
    except BadInput as error:
        return str(error)


@settings(max_examples=40)
@given(json_values | st.dictionaries(keys, json_values))
def test_any_json_is_read_or_refused(document: object) -> None:
    assert "\n" not in outcome(json.dumps(document))


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    assert "\n" not in outcome(text)


DOCS = Path(__file__).parents[2] / "docs" / "how-to"
PAGE = (DOCS / "hosts.md").read_text()


@pytest.mark.parametrize("text", re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
def test_every_example_is_a_hosts_file(text: str) -> None:
    assert len(parse_hosts(text).machines) >= 2


def test_every_field_and_every_cause_is_explained() -> None:
    words = set(re.findall(r"`([\w_]+)`", PAGE + (DOCS / "access.md").read_text()))
    kinds = ssh_errors.SshError.__subclasses__()
    assert len(kinds) > 10
    assert {*Machine.model_fields, *(kind.cause for kind in kinds)} <= words


@pytest.mark.parametrize(
    ("text", "tool", "machines"),
    [
        ('[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b"}]', "mlx", '{"master": "a", "workers": ["b"]}'),
        (
            '{"backend": "ring", "hosts": [{"ssh": "a.local", "ips": []}]}',
            "mlx",
            '{"master": "a.local", "workers": []}',
        ),
        ("# ours\na slots=1\n\nada@b slots=8 max_slots=8\n", "DeepSpeed", '{"master": "a", "workers": ["ada@b"]}'),
        ("compute_environment: LOCAL_MACHINE\nmain_process_ip: 10.0.0.1\nnum_machines: 2\n", "accelerate", "10.0.0.1"),
        ("compute_environment: LOCAL_MACHINE\nmain_process_ip: null\n", "accelerate", "a.local"),
        ("provider:\n  type: local\n  head_ip: 10.0.0.1\n  worker_ips: [10.0.0.2, 10.0.0.3]\n", "Ray", "10.0.0.3"),
        ("a\nb\n", "a list of names", '{"master": "a", "workers": ["b"]}'),
    ],
)
def test_the_hosts_file_of_another_tool_is_told_by_name_with_ours(text: str, tool: str, machines: str) -> None:
    error = refused(text)
    assert "this is a" in error.message and tool in error.message and machines in error.hint


@given(st.text(max_size=200))
def test_no_text_breaks_the_recognition_of_others(text: str) -> None:
    with contextlib.suppress(BadInput):
        refuse_foreign(text, "hosts.json")


def test_a_hosts_file_that_powershell_wrote_is_read(tmp_path: Path) -> None:
    for encoding in ("utf-16", "utf-8-sig"):
        (tmp_path / "hosts.json").write_text('{"master": "g\u00fcnther"}', encoding=encoding)
        assert load_hosts(tmp_path / "hosts.json").master.name == "günther"


WORDS = {
    "studio": [("studio", "studio", "", None)],
    "studio,ada@box.local:2222": [("studio", "studio", "", None), ("box.local", "box.local", "ada", 2222)],
    " a , b,": [("a", "a", "", None), ("b", "b", "", None)],
    "[fe80::1%en0]:22,a": [("fe80::1%en0", "fe80::1%en0", "", 22), ("a", "a", "", None)],
    "box:1,ada@box:2": [("box:1", "box", "", 1), ("ada@box:2", "box", "ada", 2)],
    "localhost,b": [("localhost", "localhost", "", None), ("b", "b", "", None)],
}


@pytest.mark.parametrize("words", WORDS)
def test_machines_are_typed_with_commas_in_place_of_a_file(words: str) -> None:
    machines = load_hosts(Path(words)).machines
    assert [(one.name, one.address, one.user, one.port) for one in machines] == WORDS[words]


@pytest.mark.parametrize("words", ["a,a", "a b", "a,-b", ",", "a,ada@", "ada@@b,c"])
def test_words_that_are_no_machines_are_refused_in_one_line(words: str) -> None:
    with pytest.raises(BadInput, match=r"^--hosts: [^\n]+$"):
        load_hosts(Path(words))


def test_a_file_is_a_file_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a,b", "studio"):
        Path(name).write_text(json.dumps(PLAIN))
        assert load_hosts(Path(name)).master.name == "studio.local"
    for missing in ("mine.json", "none/studio", str(tmp_path / "c,d")):
        with pytest.raises(BadInput, match="no such hosts file"):
            load_hosts(Path(missing))

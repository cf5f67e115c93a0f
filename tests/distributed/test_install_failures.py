"""Why pip or uv failed: texts that pip 23.2 and 26.3 and uv 0.13 have written, shortened."""

from __future__ import annotations

import pytest

from distributed.agent.install_failures import explain

NOT_THERE = """ERROR: Could not find a version that satisfies the requirement six==1.17.0 (from versions: none)
ERROR: No matching distribution found for six==1.17.0"""
RETRYING = "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by"
CONFLICT = """ERROR: Cannot install six because these package versions have conflicting dependencies.

The conflict is caused by:
{}

To fix this you could try to:
1. loosen the range of package versions you've specified

ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/en/latest/topics/dependency-resolution/#dealing"""
UV = "error: No solution found when resolving dependencies\ncause: Because "
WITHOUT_NETWORK = f"""Looking in indexes: https://index.home/simple
{RETRYING} 'NewConnectionError('<HTTPSConnection object at 0x7f>: [Errno -2] Name or service not known')': /simple/six/
{NOT_THERE}"""
CERTIFICATE = f"""{RETRYING} 'SSLError(SSLCertVerificationError('certificate verify failed: self-signed (_ssl.c:1)'))'
Could not fetch URL https://pypi.org/simple/six/: There was a problem confirming the ssl certificate - skipping
{NOT_THERE}"""
PROXY = (
    f"{RETRYING} 'OSError('Tunnel connection failed: 407 Proxy Authentication Required')': /simple/six/\n{NOT_THERE}"
)
OTHER_PYTHON = """Ignored the following versions that require a different python version: 3.6 Requires-Python >=3.9
ERROR: Could not find a version that satisfies the requirement networkx==3.6 (from versions: 3.1, 3.2.1)
ERROR: No matching distribution found for networkx==3.6"""
HASHES = """ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package
six==1.16.0 from https://files.pythonhosted.org/six-1.16.0-py2.py3-none-any.whl (from -r h.txt (line 1)):
Expected sha256 0000"""
DISK = """Downloading numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (16.9 MB)
ERROR: Exception:
Traceback (most recent call last):
OSError: [Errno 28] No space left on device"""
UV_DNS = "error: Request failed after 3 retries\ncause: Failed to fetch: https://i.home/simple/six/\ncause: dns error"
UV_403 = "was not found in the package registry\nhint: An index (http://i.home/simple) returned a 403 Forbidden error."


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (WITHOUT_NETWORK, "cannot be reached: index.home: Name or service not known (asked for six==1.17.0)"),
        (UV_DNS, "the package index cannot be reached: i.home: dns error"),
        (CERTIFICATE, "the certificate of pypi.org is not accepted: self-signed (asked for six==1.17.0)"),
        (PROXY, "the proxy does not pass on to pypi.org: 407 Proxy Authentication Required"),
        (UV + UV_403, "the package index i.home answers 403 Forbidden"),
        (NOT_THERE, "the package index has no six==1.17.0 for this Python and system"),
        (
            NOT_THERE.replace("none", "1.15.0, 1.16.0"),
            "has no six==1.17.0 for this Python and system; the newest there",
        ),
        (UV + "six was not found in the package registry and you require six", "the package index has no six for this"),
        (OTHER_PYTHON, "networkx==3.6 is not available for this Python: it needs Python >=3.9"),
        (
            CONFLICT.format("The user requested rich==13.0.0\ntextual 0.50.0 depends on rich>=13.3.3"),
            "versions exclude each other: asked for rich==13.0.0, textual 0.50.0 depends on rich>=13.3.3",
        ),
        (  # pip's word for a tested version that the index lacks
            CONFLICT.format("The user requested six>=1.10\nThe user requested (constraint) six==1.17.0"),
            "the package index has no six==1.17.0",
        ),
        (
            UV + "textual==0.50 depends on rich>=13.3.3, we can conclude that.\nAnd because you require rich==13, "
            "we can conclude that your requirements are unsatisfiable.",
            "versions exclude each other: textual==0.50 depends on rich>=13.3.3; you require rich==13",
        ),
        (HASHES, "six==1.16.0 differs from the file that was tested"),
        (DISK, "the disk is full"),
        ("/usr/bin/python3: No module named venv", "the module venv is missing in its Python"),
        ("Collecting torch\nERROR: something else", "the installer stopped with: ERROR: something else"),
        ("", "the installer stopped with: it gave no reason"),
    ],
)
def test_the_reason_of_pip_and_uv_is_told_in_one_line(output: str, problem: str) -> None:
    failure = explain(output.splitlines())
    assert problem in failure.problem and "\n" not in failure.problem
    assert failure.fix or failure.is_index_at_fault


@pytest.mark.parametrize(
    ("output", "at_fault"), [(WITHOUT_NETWORK, True), (CERTIFICATE, True), (PROXY, True), (DISK, False), (HASHES, True)]
)
def test_packages_are_sent_where_only_their_source_is_at_fault(output: str, at_fault: bool) -> None:
    assert explain(output.splitlines()).is_index_at_fault is at_fault

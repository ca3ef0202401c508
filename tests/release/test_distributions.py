"""What would be published: contents and metadata of wheel and sdist. `make dist` installs them too."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path, PurePosixPath

import pytest
import yaml
from hatchling import build

import marquardt

ROOT = Path(__file__).parents[2]
EXTRAS = {"lightning", "paper", "sklearn", "table", "transformers"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(tmp_path_factory, build.build_wheel)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(tmp_path_factory, build.build_sdist)


def contents(factory: pytest.TempPathFactory, built) -> dict[str, bytes]:
    """Every file by its name; those of an sdist without the folder that holds all."""
    folder = factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        path = folder / built(str(folder))
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as file:
            return {name: file.read(name) for name in file.namelist()}
    with tarfile.open(path) as file:
        return {
            str(PurePosixPath(*PurePosixPath(member.name).parts[1:])): file.extractfile(member).read()
            for member in file.getmembers()
            if member.isfile()
        }


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    return message_from_bytes(wheel[f"marquardt-{marquardt.__version__}.dist-info/METADATA"])


def test_the_wheel_has_the_package_and_nothing_else(wheel) -> None:
    own = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src/marquardt").rglob("*") if p.is_file()}
    own = {name for name in own if "__pycache__" not in name}
    assert {name for name in wheel if ".dist-info/" not in name} == own
    assert "marquardt/py.typed" in own


def test_the_sdist_has_what_its_readme_speaks_of(sdist) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for name in (*re.findall(r"`([\w./-]+\.(?:md|cff|py))`", description(sdist["PKG-INFO"])), "LICENSE", "Makefile"):
        assert name in sdist or not (ROOT / name).exists(), name
    assert sdist["README.md"].decode("utf-8") == readme
    assert {"src", "tests", "docs", "benchmarks", "examples"} <= {PurePosixPath(name).parts[0] for name in sdist}
    assert not any(part in name for name in sdist for part in ("__pycache__", ".venv", "paper-results"))


def description(stored: bytes) -> str:
    return message_from_bytes(stored).get_payload(decode=True).decode("utf-8")


def test_there_is_one_version(metadata) -> None:
    assert metadata["Version"] == marquardt.__version__
    written = re.compile(r'^(?:__)?version(?:__)?\s*[=:]\s*"?\d', re.MULTILINE)
    files = [ROOT / "pyproject.toml", ROOT / "CITATION.cff", ROOT / "src/marquardt/__init__.py"]
    assert [file.name for file in files if written.search(file.read_text("utf-8"))] == ["__init__.py"]


def test_torch_is_all_that_is_needed(metadata) -> None:
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.split(r"[^\w-]", line)[0] for line in needed] == ["torch"]
    assert set(metadata.get_all("Provides-Extra")) >= EXTRAS
    floor = re.fullmatch(r">=3\.(\d+)", metadata["Requires-Python"])[1]
    versions = [c.rpartition(".")[2] for c in metadata.get_all("Classifier") if "Python :: 3." in c]
    assert versions[0] == floor  # the versions that are named begin there


def test_the_readme_of_a_package_index_has_no_links_into_the_repository(metadata) -> None:
    text = metadata.get_payload(decode=True).decode("utf-8")
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("https://")] == []
    assert not re.search(r"<(picture|img|source)", text)
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.findall("^#.*", text, re.MULTILINE) == re.findall("^#.*", readme, re.MULTILINE)
    blocks = re.compile(r"```.*?```", re.DOTALL)
    assert blocks.findall(text) == blocks.findall(readme)  # code is as it was


def test_the_citation_names_the_authors_and_the_paper(metadata) -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert [author["name"] for author in cited["authors"]] == [metadata["Author"]]
    assert cited["license"] == metadata["License-Expression"]
    assert [author["family-names"] for author in cited["references"][0]["authors"]] == ["Pooladzandi", "Zhou"]


def test_nothing_is_linked_that_does_not_exist(metadata) -> None:
    """There is no public address of the project: neither links nor badges."""
    assert metadata.get_all("Project-URL") is None
    assert "badge" not in (ROOT / "README.md").read_text("utf-8")

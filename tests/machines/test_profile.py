"""Hardware profiles: every shipped file is valid and dense, lookups find and explain, links are monotone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vasuki.base.errors import ProfileError
from vasuki.machines.profile_files import available_profiles, find_profile, load_profile, profile_for_device

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
PROMISED = ["a10", "a100", "a40", "cpu", "gh200", "h100", "h100-pcie", "h200", "l4", "rtx-a6000", "rtx4090"]


def tree(name: str = "a10") -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def write(folder: Path, content: dict[str, Any], name: str = "a10") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_promised_profiles_are_there() -> None:
    assert set(PROMISED) <= set(available_profiles())


@pytest.mark.parametrize("name", PROMISED)
def test_shipped_profile_states_where_its_figures_come_from(name: str) -> None:
    profile = find_profile(name)
    assert profile.efficiency.source
    assert profile.link.source
    assert profile.price.date >= "2026-11"
    assert profile.sources
    assert profile.power.idle_w < profile.power.peak_w
    assert profile.peak_flops("bfloat16") > 0


@pytest.mark.parametrize(
    ("name", "tflops"), [("a10", 125), ("a100", 312), ("h100", 989.4), ("h200", 989.4), ("l4", 121)]
)
def test_peaks_are_dense(name: str, tflops: float) -> None:
    assert find_profile(name).peak_tflops["bfloat16"] == tflops


def test_paper_cost_figures() -> None:
    assert find_profile("a10").dollars_per_fp32_gflop_per_watt == 12
    assert find_profile("a40").dollars_per_fp32_gflop_per_watt == 52


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ProfileError, match=r"unknown GPU 'h1000'.*did you mean 'h100'"):
        find_profile("h1000")
    assert ProfileError.exit_code == 4


def test_names_forgive_case_and_underscores() -> None:
    assert find_profile("RTX_A6000").name == "rtx-a6000"


def test_found_by_path_and_by_driver_name() -> None:
    assert find_profile(PROFILES / "l4.yaml").name == "l4"
    found = profile_for_device("NVIDIA A10")
    assert found is not None
    assert found.name == "a10"
    assert profile_for_device("Radeon 9000") is None


def test_missing_file_and_missing_dtype() -> None:
    with pytest.raises(ProfileError, match="cannot read hardware profile"):
        find_profile("nowhere/a10.yaml")
    with pytest.raises(ProfileError, match="no peak_tflops for float8; it lists bfloat16"):
        find_profile("a10").peak_flops("float8")


def test_user_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tree()
    content["memory_gb_per_s"] = 599
    write(tmp_path, content)
    monkeypatch.setenv("VASUKI_PROFILES", str(tmp_path))
    assert find_profile("a10").memory_gb_per_s == 599
    assert find_profile("a40").memory_gb_per_s == 696


def test_found_in_config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vasuki" / "profiles"
    folder.mkdir(parents=True)
    content = tree()
    content["name"] = "mine"
    write(folder, content, "mine")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert find_profile("mine").title == content["title"]
    assert "mine" in available_profiles()


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ((), "memory_gbs_per_s", "unknown key 'memory_gbs_per_s' .did you mean 'memory_gb_per_s'"),
        (("link",), "curves", "unknown key 'link.curves' .did you mean 'curve'"),
        (("efficiency",), "matmuls", "unknown key 'efficiency.matmuls' .did you mean 'matmul'"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(
    tmp_path: Path, section: tuple[str, ...], key: str, message: str
) -> None:
    content = tree()
    place = content
    for part in section:
        place = place[part]
    place[key] = 1
    with pytest.raises(ProfileError, match=message):
        load_profile(write(tmp_path, content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_mib": None}, "memory_mib: should be a valid integer"),
        ({"name": "b10"}, "name is 'b10' but the file is called 'a10'"),
        ({"efficiency": {"matmul": 1.5, "source": "x"}}, "efficiency.matmul: should be less than or equal to 1"),
        ({"peak_tflops": {}}, "peak_tflops"),
        (
            {
                "measured": {
                    "source": "x",
                    "matmul": [{"k": 1, "n": 1, "dtype": "float16", "tokens": [1, 2], "us": [1]}],
                }
            },
            "pairs",
        ),
        (
            {
                "measured": {
                    "source": "x",
                    "matmul": [{"k": 1, "n": 1, "dtype": "float16", "tokens": [2, 1], "us": [1, 1]}],
                }
            },
            "rise",
        ),
        ({"memory_gb_per_s": float("inf")}, "memory_gb_per_s"),
        ({"memory_gb_per_s": float("nan")}, "memory_gb_per_s"),
        ({"measured": "elsewhere.yaml"}, "cannot read hardware profile"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        load_profile(write(tmp_path, tree() | change))
    assert "\n" not in str(caught.value)


def test_not_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "a10.yaml"
    path.write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(ProfileError, match="does not describe a hardware profile"):
        load_profile(path)
    for text in ("a: [", "a: 2026-02-30"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ProfileError, match="is not valid YAML"):
            load_profile(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ProfileError, match="does not describe a hardware profile"):
        load_profile(path)


def test_curve_must_be_monotone(tmp_path: Path) -> None:
    content = tree()
    content["link"]["curve"] = [
        {"bytes": 4096, "h2d": 1, "d2h": 1, "both": 1},
        {"bytes": 8192, "h2d": 9, "d2h": 9, "both": 9},
    ]
    with pytest.raises(ProfileError, match="copy of 8192 bytes is faster than one of 4096"):
        load_profile(write(tmp_path, content))
    content["link"]["curve"].reverse()
    with pytest.raises(ProfileError, match="curve must rise in bytes"):
        load_profile(write(tmp_path, content))


@given(st.sampled_from(PROMISED), st.floats(1, 2**32), st.floats(1, 2**32), st.sampled_from(["h2d", "d2h", "both"]))
def test_copy_time_rises_and_bandwidth_never_exceeds_the_best(
    name: str, one: float, other: float, direction: Any
) -> None:
    link = find_profile(name).link
    small, large = sorted((one, other))
    assert link.copy_s(small, direction) <= link.copy_s(large, direction) * (1 + 1e-12)
    best = max(getattr(point, direction) for point in link.curve) * 1e9
    assert link.bandwidth_bytes_per_s(large, direction) <= best * (1 + 1e-9)


@given(st.floats(0, 2**34), st.floats(0, 2**34), st.sampled_from([0, 65536, 2**22]))
def test_two_engines_lie_between_the_longer_copy_and_both_in_turn(h2d: float, d2h: float, copy_bytes: float) -> None:
    link = find_profile("a10").link
    together = link.transfer_s(h2d, d2h, copy_bytes)
    alone = [link.transfer_s(h2d, 0, copy_bytes), link.transfer_s(0, d2h, copy_bytes)]
    assert max(alone) * (1 - 1e-9) <= together <= sum(alone) * (1 + 1e-9)
    one_engine = link.model_copy(update={"copy_engines": 1})
    assert one_engine.transfer_s(h2d, d2h, copy_bytes) == pytest.approx(sum(alone))


def test_points_are_met() -> None:
    link = find_profile("a10").link
    for point in link.curve:
        assert link.bandwidth_bytes_per_s(point.bytes, "h2d") == pytest.approx(point.h2d * 1e9)
    assert link.transfer_s(2**20, 0, 2**16) == pytest.approx(16 * link.copy_s(2**16, "h2d"))

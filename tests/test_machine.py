"""How much memory a process may use."""

from fairseq_knnlm import machine


def test_memory_limits_of_control_groups(tmp_path, monkeypatch):
    group = tmp_path / "cgroup/docker/box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("3000000000\n")
    (group / "memory.current").write_text("1000000000\n")
    (group / "memory.stat").write_text("anon 5\nactive_file 200\ninactive_file 300\n")
    (group.parent / "memory.max").write_text("max\n")
    (tmp_path / "own").write_text("0::/docker/box\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(machine, "_system_memory", lambda: 64 << 30)
    assert machine.available_memory() == 2_000_000_500
    (group.parent / "memory.max").write_text("700\n")
    assert machine.available_memory() == 700

"""The files that users copy to start a script: what they call, and with which variables."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "launch"
TELLS = (
    '#!/bin/sh\necho "$(basename "$0")" "$@"\nenv | grep -E "^(RANK=|LOCAL|MASTER|WORLD|TACIT|GLOO)" | sort\n'
)


def ran(folder: Path, name: str, **variables: str) -> list[str]:
    """What the commands of a launch file print: stand-ins that tell how they were called."""
    for command in ("torchrun", "python"):
        (folder / command).write_text(TELLS)
    (folder / "scontrol").write_text('#!/bin/sh\nprintf "first\\nsecond\\n"\n')
    (folder / "srun").write_text('#!/bin/sh\nexport SLURM_PROCID=3 SLURM_LOCALID=1\nexec "$@"\n')
    for file in folder.iterdir():
        file.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(FOLDER / name), "train.py", "--lr", "0.1"],
        env={"PATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_torchrun_on_each_machine(tmp_path: Path) -> None:
    called, *variables = ran(
        tmp_path, "torchrun.sh", FIRST="10.0.0.1", NODES="2", RANKS="4", INTERFACE="eth0"
    )
    assert called == (
        "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 "
        "--rdzv-id tacit train.py --lr 0.1"
    )
    assert variables == ["GLOO_SOCKET_IFNAME=eth0", "TACIT_ALGORITHM=lowbit"]
    _, *variables = ran(tmp_path, "torchrun.sh", FIRST="10.0.0.1", TACIT_ALGORITHM="diloco")
    assert variables == ["TACIT_ALGORITHM=diloco"], "an interface of no name is none"


def test_the_first_machine_must_be_named() -> None:
    done = subprocess.run(
        [str(FOLDER / "torchrun.sh"), "train.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "FIRST: an address of the first machine, such as 10.0.0.1" in done.stderr


@pytest.mark.parametrize("ranks", [{"RANKS": "4"}, {"SLURM_GPUS_ON_NODE": "4"}])
def test_a_torchrun_on_each_node_of_slurm(tmp_path: Path, ranks: dict[str, str]) -> None:
    slurm = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    called, *_ = ran(tmp_path, "slurm.sh", **slurm, **ranks)
    assert called == (
        "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint first:29500 --rdzv-id 7 "
        "train.py --lr 0.1"
    )


def test_a_task_of_slurm_for_each_rank(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NNODES": "2", "SLURM_NTASKS": "4"}
    called, *variables = ran(tmp_path, "slurm_tasks.sh", **slurm)
    assert called == "python train.py --lr 0.1"
    assert variables == [
        *("LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=first", "MASTER_PORT=29500", "RANK=3"),
        *("TACIT_ALGORITHM=lowbit", "WORLD_SIZE=4"),
    ]


def test_jobs_of_kubernetes_start_torchrun_on_two_nodes_of_eight() -> None:
    old = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
    worker = old["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert (old["kind"], worker["replicas"], old["spec"]["nprocPerNode"]) == ("PyTorchJob", 2, "8")
    assert container["name"] == "pytorch"
    new = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
    trainer = new["spec"]["trainer"]
    assert (new["kind"], trainer["numNodes"], trainer["numProcPerNode"]) == ("TrainJob", 2, 8)
    assert trainer["command"] == container["command"] == ["torchrun", "/work/train.py"]
    assert {"name": "TACIT_ALGORITHM", "value": "lowbit"} in trainer["env"]
    assert trainer["env"] == container["env"]

"""Queues, allocations and traces in files: what is read, and what is refused with its place."""

from __future__ import annotations

import json

import pytest

from meshwright.cluster import Server, Servers
from meshwright.cluster.generate import synthetic
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import plan_allocation
from meshwright.errors import FormatError, UsageError
from meshwright.io.cluster import load_queue, read_allocation, read_queue, write_allocation, write_queue
from meshwright.io.cluster.traces import read_gavel, read_gavel_rates, read_job_table, read_philly
from meshwright.testing.soak.files import seeds

FILES = {reader: data for reader, _, data in seeds() if reader in ("queue", "Philly", "Gavel", "Alibaba", "Gavel rates")}
RATES = {("ResNet-18 (batch size 16)", 1): 20.0, ("LM (batch size 5)", 2): 8.0}


def written(tmp_path, name: str, data):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_queues_and_allocations_come_back(tmp_path):
    queue = synthetic(12, per_hour=20, seed=3)
    for name in ("q.json", "q.json.gz"):
        write_queue(tmp_path / name, queue)
        assert read_queue(tmp_path / name) == queue == load_queue(str(tmp_path / name))
    servers = Servers(servers=tuple(Server(name=f"s{n}", gpus=tuple(f"s{n}g{k}" for k in range(8)), cores=24,
        memory_bytes=500 * 10**9) for n in range(2)))
    found, _ = plan_allocation(servers, queue, order("fifo")(), allocation("priced")())
    write_allocation(tmp_path / "a.json", found)
    first = (tmp_path / "a.json").read_bytes()
    assert read_allocation(tmp_path / "a.json") == found
    write_allocation(tmp_path / "a.json", read_allocation(tmp_path / "a.json"))
    assert (tmp_path / "a.json").read_bytes() == first
    broken = json.loads(first)
    broken["bound"]["value"] = "0.5"
    with pytest.raises(FormatError, match="exact rational"):
        read_allocation(written(tmp_path, "b.json", json.dumps(broken)))


@pytest.mark.parametrize(("change", "says"), [
    (("jobs", 0, "gpus", -1), r"jobs\[0\].gpus"), (("jobs", 1, "profile", "none"), r"jobs\[1\].profile"), (("jobs", 0, "arrival_s", -3), "time of"),
    (("profiles", 0, "speed", [[1.0]]), "profile"), (("schema", None, None, "x"), "document"), (("version", None, None, 9), "newer"),
])  # fmt: skip
def test_queues_that_are_refused(tmp_path, change, says):
    document = json.loads(FILES["queue"])
    first, second, third, value = change
    if second is None:
        document[first] = value
    else:
        document[first][second][third] = value
    with pytest.raises(FormatError, match=says):
        read_queue(written(tmp_path, "q.json", json.dumps(document)))


def test_philly(tmp_path):
    job = json.loads(FILES["Philly"])[0]
    late = job | {"jobid": "a0", "submitted_time": "2017-10-07 01:12:39", "attempts": [
        *job["attempts"], {"start_time": "2017-10-07 02:00:00", "end_time": "2017-10-07 03:00:00", "detail": [{"gpus": ["gpu0"]}]},
        {"start_time": "2017-10-07 04:00:00", "end_time": None, "detail": []},
    ]}  # fmt: skip
    never = job | {"jobid": "a2", "attempts": []}
    path = written(tmp_path, "log.json", json.dumps([late, job, never]))
    found = read_philly(path)
    assert [(j.name, j.gpus, j.arrival_s, j.duration_s) for j in found.jobs] == [("a1", 2, 0.0, 74.0), ("a0", 1, 60.0, 3674.0)]
    assert load_queue(str(path)) == found and load_queue(str(path), split=(100, 0, 0), seed=1).jobs[0].profile in ("alexnet", "shufflenet", "res18",
        "mobilenet", "res50")  # fmt: skip
    back = job | {"attempts": [job["attempts"][0] | {"end_time": "2016-01-01 00:00:00"}]}
    for wrong, says in (
        ([back], r"\[0\].*before it starts"), ([late, late], "twice"), ([never], "no job in it"),
        ([late | {"submitted_time": "yesterday"}], "is no time"), ({"a": 1}, "Expected `array`"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=says):
            read_philly(written(tmp_path, "bad.json", json.dumps(wrong)))


def test_gavel(tmp_path):
    path, rates = written(tmp_path, "t.trace", FILES["Gavel"]), written(tmp_path, "rates.json", FILES["Gavel rates"])
    found = read_gavel(path, rates=RATES)
    assert [(j.gpus, j.profile, j.arrival_s, j.duration_s) for j in found.jobs] == [(1, "res18", 0.0, 450.0), (2, "lstm", 7.5, 50.0)]
    newest = FILES["Gavel"].decode().splitlines()[0].split("\t")
    newest.insert(7, "static")
    assert read_gavel(written(tmp_path, "n.trace", "\t".join(newest)), rates=RATES).jobs[0].duration_s == 450.0
    newest[8:8] = ["1"]  # Shockwave's: a mode, weight, objective, and a duration
    assert read_gavel(written(tmp_path, "s.trace", "\t".join(newest)), rates=RATES).jobs[0].duration_s == 450.0
    oldest = "ResNet-18 (batch size 16)\tpython3 main.py\t--steps\t1\t9000\t60.5\t1\nLM (batch size 5)\tx\t--steps\t1\t800\t3.5\t2"  # traces/msr
    jobs = read_gavel(written(tmp_path, "o.trace", oldest), rates=RATES).jobs
    assert [(j.gpus, j.arrival_s, j.duration_s) for j in jobs] == [(2, 0.0, 100.0), (1, 57.0, 450.0)]
    assert read_gavel_rates(rates)["ResNet-18 (batch size 16)", 1] == 20.5
    assert load_queue(str(path), rates=str(rates)).jobs[1].duration_s == 50.0
    with pytest.raises(UsageError, match="counts steps"):
        load_queue(str(path))
    with pytest.raises(FormatError, match="no GPU 'h100'"):
        read_gavel_rates(rates, "h100")
    text = FILES["Gavel"].decode()
    for wrong, says in (
        (text.replace("ResNet-18", "Quantum"), "t.trace:1: unknown job type 'Quantum"), (text.replace("12.5", "-12.5"), "arrival is '-12.5'"),
        (text.replace("9000", "x"), "steps is 'x'"), ("a\tb\n", "2 columns"), ("\n", "no job in it"), (text.replace("size 5", "size 7"),
            "no rate of"),
        (text.replace("\t9000\t1\t", "\t9000\t1.5\t"), "GPUs is '1.5'"),
    ):  # fmt: skip
        with pytest.raises(FormatError) as refused:
            read_gavel(written(tmp_path, "t.trace", wrong), rates=RATES)
        assert says in str(refused.value)


def test_tables_of_jobs(tmp_path):
    path = written(tmp_path, "pods.csv", FILES["Alibaba"])
    found = read_job_table(path)
    assert [(j.name, j.gpus, j.arrival_s, j.duration_s) for j in found.jobs] == [("p0", 1, 0.0, 12537496.0), ("p1", 2, 427061.0, 12475890.0)]
    assert load_queue(str(path)) == found
    newer = "instance_sn,gpu_request,creation_time,scheduled_time,deletion_time\ni0,1,,,90.0\ni1,1,10.0,12.0,72.0\ni2,1,15.0,16.0,\n"  # Alibaba 2025
    assert [(j.name, j.gpus, j.duration_s) for j in read_job_table(written(tmp_path, "dlrm.csv", newer)).jobs] == [("i1", 1, 60.0)]
    acme = "job_id,gpu_num,submit_time,start_time,end_time\n7,8,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00\n"
    helios = acme.replace("+08:00", "") + "8,4,2023-02-28 20:18:22,None,2023-03-01 00:18:22\n"
    for text, wanted in ((acme, [("7", 8, 0.0, 117.0)]), (helios, [("8", 4, 0.0, 14400.0), ("7", 8, 14400.0, 117.0)])):
        jobs = read_job_table(written(tmp_path, "log.csv", text)).jobs
        assert [(j.name, j.gpus, j.arrival_s, j.duration_s) for j in jobs] == wanted
    with pytest.raises(FormatError, match="is no time"):
        read_job_table(written(tmp_path, "log.csv", acme.replace("03-01", "13-01")))
    text = FILES["Alibaba"].decode()
    for wrong, says in (
        (text.replace("12537496", "-5"), "deletion_time is '-5'"), (text.replace(",12902960,", ",1,"), "before it starts"),
        (text.replace("num_gpu", "gpus"), "lacks columns: num_gpu or gpu_request or gpu_num"), (text.replace("p1", "p0"), "taken"),
        (text + "x,1\n", "2 columns"),
        (text.replace("12000", '"12000"x'), "not CSV"), (text + "x" * 70000, "characters"),
    ):  # fmt: skip
        with pytest.raises(FormatError) as refused:
            read_job_table(written(tmp_path, "pods.csv", wrong))
        assert says in str(refused.value)


def test_tables_of_tasks(tmp_path):
    """Alibaba 2020, as published: no names of columns, GPUs in percent of one of each instance, a job's tasks in lines of their own."""
    lines = [
        "j1,worker,2.0,Terminated,100.0,400.0,600.0,29.296875,200.0,V100", "j1,ps,1.0,Terminated,90.0,410.0,600.0,29.3,,CPU",
        "j2,tensorflow,3.0,Failed,50.0,80.0,600.0,29.3,25.0,MISC", "j1,evaluator,1.0,Terminated,120.0,500.0,600.0,29.3,50.0,V100",
        "j3,tensorflow,1.0,Running,70.0,,600.0,29.3,100.0,T4", "j4,tensorflow,1.0,Waiting,,,600.0,29.3,100.0,",
    ]  # fmt: skip
    wanted = [("j2", 3, 0.0, 30.0), ("j1", 5, 50.0, 400.0)]  # without the ps, which has no GPU, and those that did not end
    header = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type"
    for text in ("\n".join(lines), "\n".join([header, *lines])):
        path = written(tmp_path, "pai_task_table.csv", text)
        assert [(j.name, j.gpus, j.arrival_s, j.duration_s) for j in load_queue(str(path)).jobs] == wanted
    sample = "job_id,num_inst,submit_time,num_cpu,num_gpu,gpu_type,duration,user\n"
    sample += "a,1,0,6.0,0.25,MISC,90,u\nb,4,30,6,2,V100,60.5,u\nc,1,3,6,0,CPU,9,u\n"
    jobs = read_job_table(written(tmp_path, "pai_job.csv", sample)).jobs
    assert [(j.name, j.gpus, j.arrival_s, j.duration_s) for j in jobs] == [("a", 1, 0.0, 90.0), ("b", 8, 30.0, 60.5)]
    for wrong, says in (
        ((lines[0], lines[2].replace("80.0", "8.0")), ":2: a task of job j2 ends 42 s before it starts"),
        ((lines[0], lines[2].replace("Failed", "Lost")), "in state 'Lost'"), ((lines[0], "x,y"), ":2: 2 columns, a table of tasks has 10"),
        ((lines[0].replace("200.0", "-1"),), "plan_gpu is '-1'"), ((lines[0].replace("2.0,T", "1.5,T"),), "inst_num is '1.5'"),
        ((lines[0].replace("2.0,T", "999999,T"), lines[3]), "GPUs"), ((sample.replace("b,4,", "b,0,"),), "instances is '0'"),
        ((sample.replace("b,4,", "b,999999,"),), "job b has 1999998 GPUs"),
    ):  # fmt: skip
        with pytest.raises(FormatError) as refused:
            read_job_table(written(tmp_path, "wrong.csv", "\n".join(wrong)))
        assert says in str(refused.value)


def test_synthetic_names():
    assert load_queue("synthetic:jobs=5,per_hour=2,seed=1,split=0/100/0,most_gpus=2") == synthetic(5, per_hour=2, seed=1, split=(0, 100, 0),
        most_gpus=2)
    assert len(load_queue("synthetic").jobs) == 300
    for wrong in ("synthetic:jobs=x", "synthetic:colour=1", "synthetic:jobs=0", "synthetic:seed=-1", "synthetic:per_hour=0", "/no/such/file.json"):
        with pytest.raises(UsageError):
            load_queue(wrong)

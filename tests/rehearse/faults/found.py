"""Scenarios in which a mistake was found that has been mended: what they drew, as it was then."""

from __future__ import annotations

from tests.rehearse.faults.scenario import (
    BOTH,
    SERVED,
    SERVERS,
    WORKERS,
    AnyOrder,
    Breaks,
    Delays,
    FullDisk,
    Jitter,
    Kill,
    Kind,
    Restarts,
    Scenario,
    Silent,
    Slow,
    Stop,
)

ASYNC = Kind('ps(mode="async")', "log", SERVED, True, loses=WORKERS)
COPIED = Kind("ps(replicas=2)", "equal", SERVED, True, loses=SERVERS, copies=2)
NAMED = Kind('ddp(algorithm="ring")', "equal")
ELASTIC = Kind("zero(3, elastic=True)", "equal", loses=WORKERS)
QUORUM = Kind("ps(quorum=0.5)", "log", SERVED, True, loses=WORKERS)

FOUND: dict[str, Scenario] = {
    # it trained on weights of zero, and its pushes were lost when the others gave the first ones
    "a worker comes back before the servers have their first weights": Scenario(
        193,
        ASYNC,
        4,
        "counts",
        samples=14,
        batch=7,
        epochs=3,
        faults=(
            Slow("worker 1", 1.5),
            Jitter(0.5),
            Stop("worker 1", 0.0675, 10.9156),
            Stop("worker 3", 0.0362, 0.0252),
            Delays(0.2, 0.2),
            Kill("worker 2", 0.0674),
            Kill("worker 2", 0.0375),
            Restarts(3, 0.02),
        ),
    ),
    "all workers come back before the servers have their first weights": Scenario(
        3,
        QUORUM,
        2,
        "counts",
        samples=14,
        batch=7,
        epochs=2,
        faults=(
            Delays(1.0, 0.2),
            Kill("worker 0", 0.01),
            Kill("worker 1", 0.6),
            Restarts(2, 0.001),
        ),
    ),
    # the launcher took its exit for one that it had caused, and had no words for the end
    "all workers are lost at one moment": Scenario(
        64,
        QUORUM,
        1,
        "counts",
        samples=29,
        batch=8,
        epochs=2,
        faults=(AnyOrder(), Kill("worker 0", 0.0069)),
    ),
    # the others waited for it without end: seeds 103, 443 and 509
    "a server is lost before its shard has begun": Scenario(
        443,
        COPIED,
        1,
        "counts",
        samples=9,
        batch=8,
        epochs=1,
        faults=(Breaks(4, 200, 0.5), Kill("server 1", 0.001)),
    ),
    # of the runs with faults alone: it asked for the weights outside of what survives a loss
    "a worker is lost while all look at their weights": Scenario(
        926,
        ELASTIC,
        5,
        "counts",
        samples=28,
        batch=7,
        epochs=1,
        faults=(
            Stop("worker 3", 0.015, 0.006),
            Stop("worker 0", 0.0103, 0.1),
            Kill("worker 4", 0.0369),
            Kill("worker 2", 0.0233),
        ),
    ),
    # the thread that had made room for a checkpoint kept the memory of all workers
    "a save fails for want of room after one that did not": Scenario(
        1676,
        NAMED,
        2,
        "mlp",
        samples=22,
        batch=8,
        epochs=3,
        optimizer="momentum",
        microbatches=2,
        saves=True,
        faults=(AnyOrder(), FullDisk(save=2, num_bytes=986)),
    ),
    # the server's exit hid that of the worker, and the run counted as one that had succeeded
    "a server is lost while the run ends because all workers are": Scenario(
        40255,
        Kind('ps(replicas=2, servers=2, mode="async")', "log", SERVED, True, loses=BOTH, copies=2),
        1,
        "counts",
        samples=24,
        batch=8,
        epochs=1,
        faults=(AnyOrder(), Kill("worker 0", 0.0074), Kill("server 2", 0.0079), Silent(0.01)),
    ),
    # its gradients were not sent, and the push was committed without them
    "a worker that finds no head after a long stop finds one for its commit": Scenario(
        3833,
        Kind("ps(replicas=2, quorum=0.5)", "log", SERVED, True, loses=BOTH, copies=2),
        1,
        "counts",
        samples=29,
        batch=8,
        epochs=2,
        faults=(
            AnyOrder(),
            Stop("worker 0", 0.0823, 12.8655),
            Breaks(1, 4000, 0.01),
            Kill("server 0", 0.051),
            Silent(0.5),
        ),
    ),
}

"""How the processes of a run start and end: `start` finds the others, `ending_together` takes them along.

JAX's runtime does both; here is the search for its settings, a bounded wait with a message that says what is missing,
and a word to the others when one process fails. What processes share while they run: `distributed.py`.
"""

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import jax

# JAX offers its search for a cluster and its key-value store under these names alone.
from jax._src import clusters
from jax._src.distributed import global_state

_FAILED = "jaxrl_lm/failed"
_POLL = 0.5  # seconds between looks for a failure of another process
_GRACE = 4.0  # seconds in which another's word is waited for, and in which the first process keeps its own readable
_EXPECTED = (ValueError, OSError, ImportError, FloatingPointError, MemoryError)  # told in one line
# Of Open MPI, of MPICH, and of torchrun and Kubernetes operators.
_MPI = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"), ("WORLD_SIZE", "RANK"))


class Cluster(NamedTuple):
    """Where the first process listens, how many there are, and which one this is."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: list[int] | None = None


def find_cluster(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    start_timeout: int,
) -> Cluster | None:
    """The settings of a run of several processes; None where this is the only one.

    Options win; the rest comes from JAX's own search (TPU metadata, Slurm, Open MPI, Kubernetes), and beside an address
    from the variables of Open MPI, MPICH or torchrun. `num_processes` 1 turns the search off. Raises ValueError, naming the
    option, for settings that are incomplete or contradict each other.
    """
    if num_processes == 1:
        return None
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    local, failed = None, ""
    if None in (address, num_processes, process_id):
        try:
            address, num_processes, process_id, local = _search(address, num_processes, process_id, start_timeout)
        except RuntimeError as error:  # a cluster that JAX knows and cannot ask: Open MPI 5 without mpi4py
            failed = f"; JAX says: {error}"
    if address is not None:
        for size, rank in _MPI:
            if num_processes is None and process_id is None and size in os.environ and rank in os.environ:
                num_processes, process_id = int(os.environ[size]), int(os.environ[rank])
    given = {"coordinator_address": address, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        # Open MPI 5 names no address: JAX 0.12 asks mpi4py for it, JAX 0.10 sees no cluster.
        if failed or os.environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
            raise ValueError(
                "this is one of the processes of a cluster, and the first of them was not found: give coordinator_address; "
                f"num_processes=1 runs alone{failed}"
            )
        if "JOB_COMPLETION_INDEX" in os.environ:
            raise ValueError(
                "this is a pod of an indexed Kubernetes job, and JAX needs the package kubernetes to find the others: pip "
                "install 'jax[k8s]', or give coordinator_address, num_processes and process_id; num_processes=1 runs alone"
            )
        return None
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: not given, and not found in the environment, while "
            f"{', '.join(name for name in given if name not in missing)} is: give all three, or none to run in one process"
            f"{failed}"
        )
    if num_processes == 1:
        return None
    return Cluster(address, num_processes, process_id, local)


def _search(address: str | None, num_processes: int | None, process_id: int | None, timeout: int) -> tuple:
    """What JAX finds: the three settings, and the numbers of this process's devices."""
    with warnings.catch_warnings():  # of a missing package; what it is needed for is said by `find_cluster`
        warnings.simplefilter("ignore")
        return clusters.ClusterEnv.auto_detect_unset_distributed_params(
            address, num_processes, process_id, None, None, timeout
        )


def check_cluster(cluster: Cluster) -> None:
    """Raises ValueError, naming the option, for numbers that cannot be and an address without a port."""
    host, _, port = cluster.coordinator_address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"coordinator_address={cluster.coordinator_address!r}: give host:port of process 0")
    if cluster.num_processes < 1:
        raise ValueError(f"num_processes={cluster.num_processes}: must be at least 1")
    if not 0 <= cluster.process_id < cluster.num_processes:
        raise ValueError(
            f"process_id={cluster.process_id}: must be from 0 to {cluster.num_processes - 1} with "
            f"num_processes={cluster.num_processes}"
        )


def start(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    start_timeout: int = 300,
    heartbeat_timeout: int = 100,
) -> int:
    """The number of processes, which have found each other; 1 where this is the only one.

    Call it before anything that touches a device; a second call changes nothing. Raises ValueError as `find_cluster`,
    and ConnectionError where the coordinator cannot be reached within `start_timeout` seconds; where it can be and
    other processes do not come in that time, this process ends with a message. After `heartbeat_timeout` seconds
    without a sign of life of a process the others end.
    """
    if jax.distributed.is_initialized():
        return jax.process_count()
    for name, seconds in (("start_timeout", start_timeout), ("heartbeat_timeout", heartbeat_timeout)):
        if seconds < 1:
            raise ValueError(f"{name}={seconds}: must be at least 1 second")
    cluster = find_cluster(coordinator_address, num_processes, process_id, start_timeout=start_timeout)
    if cluster is None:
        return 1
    check_cluster(cluster)
    deadline = time.monotonic() + start_timeout
    if cluster.process_id:
        _reach(cluster, start_timeout)
    late = threading.Timer(max(deadline - time.monotonic(), 1.0), _give_up, (cluster, start_timeout))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            cluster.coordinator_address,
            cluster.num_processes,
            cluster.process_id,
            local_device_ids=cluster.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=start_timeout + 60,  # the timer is first: JAX's own end is a dump of its stack
            heartbeat_timeout_seconds=heartbeat_timeout,
        )
        devices = jax.device_count()  # the processes tell each other their devices
    finally:
        late.cancel()
    if devices != cluster.num_processes * jax.local_device_count():
        raise ValueError(
            f"{devices} devices in all, and {jax.local_device_count()} at process {cluster.process_id}: give every process "
            "the same number"
        )
    _watch()
    return cluster.num_processes


def _reach(cluster: Cluster, timeout: int) -> None:
    """Returns when somebody listens at the coordinator's address."""
    host, _, port = cluster.coordinator_address.rpartition(":")
    deadline, reason = time.monotonic() + timeout, "no time"
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(left, 10.0)).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(0.2, max(deadline - time.monotonic(), 0.0)))
    raise ConnectionError(
        f"process {cluster.process_id} of {cluster.num_processes}: the coordinator at {cluster.coordinator_address} could "
        f"not be reached within start_timeout={timeout} seconds ({reason}): start process 0 there, and check "
        "coordinator_address and the firewall"
    )


def _give_up(cluster: Cluster, timeout: int) -> None:
    others = "of the other processes" if cluster.process_id == 0 else "of the processes"
    print(
        f"process {cluster.process_id} of {cluster.num_processes}: not all {others} came within "
        f"start_timeout={timeout} seconds to {cluster.coordinator_address}: start the same command once for each "
        f"process_id from 0 to {cluster.num_processes - 1}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


# --- the end ----------------------------------------------------------------------------------------------------------

_leaving = threading.Event()  # this process ends by itself: it need not look at the others


def _watch() -> None:
    """Ends this process within about a second of another's word that it failed."""

    def look() -> None:
        while not _leaving.wait(_POLL):
            word = _word_of_failure()
            if word is not None and not _leaving.is_set():
                _end(f"process {jax.process_index()} stops: {word}", 1)

    thread = threading.Thread(target=look, daemon=True, name="watch-processes")
    thread.start()

    def stop() -> None:
        _leaving.set()
        thread.join(5.0)

    atexit.register(stop)  # before JAX's own end, which closes the store that is looked at


def _word_of_failure() -> str | None:
    try:
        return global_state.client.key_value_try_get(_FAILED)
    except jax.errors.JaxRuntimeError:  # not there, or the runtime is about to end this process itself
        return None


def _end(message: str, code: int) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    # A normal exit would wait for the other processes, which wait in the middle of a step.
    os._exit(code)


@contextlib.contextmanager
def ending_together(name: str = "jaxrl-lm") -> Iterator[None]:
    """Where the body fails in one of several processes, all end: this one with its error, the others with a word of it.

    With one process errors pass through. A failure that leaves no time for a word, such as SIGKILL, is noticed by a
    broken connection, or by a missing sign of life.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized() or (isinstance(error, SystemExit) and error.code in (0, None)):
            raise
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(_GRACE)  # most likely the end of another, whose word then ends this process
        _leaving.set()
        _leave(name, error)


def _leave(name: str, error: BaseException) -> None:
    process, code = f"process {jax.process_index()}", 1
    if isinstance(error, SystemExit):
        reason, code = str(error.code), error.code if isinstance(error.code, int) else 1
        shown = f"{name}: {process}: exit {reason}"
    elif isinstance(error, jax.errors.JaxRuntimeError):
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        traceback.print_exception(error)
        shown = (
            f"{name}: {process}: error: {reason}\nIf it is a broken connection, another process has ended: its output has "
            "the cause. The same command goes on from the last checkpoint"
        )
    elif isinstance(error, _EXPECTED) and not os.environ.get("JAXRL_LM_TRACEBACK"):
        reason, code = str(error), 2
        shown = f"{name}: {process}: error: {reason}"
    else:
        reason = f"{type(error).__name__}: {error}"
        traceback.print_exception(error)
        shown = f"{name}: {process}: {reason}"
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was first
        global_state.client.key_value_set(_FAILED, f"{process} failed: {reason}")
    if jax.process_index() == 0:
        sys.stdout.flush()
        print(shown, file=sys.stderr, flush=True)
        time.sleep(_GRACE)  # the word lies with this process
        os._exit(code)
    _end(shown, code)

from shoal.runtime.cores import most_server_threads, server_threads, threads_of


def test_a_small_slice_is_left_to_one_core() -> None:
    assert server_threads(1 << 20, most=16) == 1
    assert server_threads(64 << 20, most=16) == 8
    assert server_threads(1 << 40, most=16) == 16


def test_servers_share_the_cores_of_their_host() -> None:
    assert most_server_threads(16, servers=2) == 8
    assert most_server_threads(2, servers=4) == 1
    assert int(threads_of(1)["OMP_NUM_THREADS"]) >= 1

"""What the stages of a pipeline send each other is what docs/nccl.md says, byte by byte."""

FP32 = 4


def test_stages_send_hidden_states_and_gather_weights_once_per_step(server):
    cases = server.rows("pipeline_traffic.main", ranks=4)
    assert len(cases) == 3
    for case in cases:
        layout, shape = case["layout"], case["shape"]
        # Four stages have three borders; the middle one of a V is inside a rank.
        borders_of_a_rank = {"1F1B": 1, "Interleaved1F1B": 3, "ZBVZeroBubble": 2}[layout["schedule"]]
        readers = 4 // layout["pipeline"] // layout["tensor"]
        tokens = case["rows"] // readers * case["seq_len"] // layout["tensor"]  # of all micro-batches of a step
        tensors = 1 + shape["num_nextn_predict_layers"]
        for rank in case["ranks"]:
            # On each border one rank sends results forward, the other one gradients back.
            assert rank["bytes"]["send"] == borders_of_a_rank * tensors * tokens * shape["hidden_size"] * FP32, layout
            assert rank["calls"]["send"] == borders_of_a_rank * layout["micro_batches"] * 2, layout
            if layout["tensor"] == 1:
                # However many micro-batches: once per step, where other layouts gather for each forward and backward.
                for name in ("all_gather", "reduce_scatter"):
                    assert rank["bytes"][name] == rank["parameters"] * readers * FP32, (name, layout)

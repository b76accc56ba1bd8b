# SPDX-License-Identifier: Apache-2.0
"""What PyTorch does around the operators on a GPU: streams, graphs, compilation, autocast, memory, models."""

import pytest
import torch

import distrattention
from distrattention import ops, replace_sdpa

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(ops.describe().cuda_build == "none", reason="the package was built without CUDA"),
]

DEVICE = "cuda"
BF16 = torch.bfloat16
SETTINGS = [
    dict(strategy="exact"),
    dict(strategy="lsh", group_size=2),
    dict(strategy="energy", group_size=4, is_causal=True),
]


def attention(q, k, v, **settings):
    return distrattention.scaled_dot_product_attention(q, k, v, **settings)


def tensors(n=500, batch=2, dtype=BF16, grad=False):
    return [torch.randn(batch, 4, n, 64, device=DEVICE, dtype=dtype, requires_grad=grad) for _ in range(3)]


def with_gradients(q, k, v, **settings):
    out = attention(q, k, v, **settings)
    return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))


def capture(step):
    """A graph of the step, which runs once before, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@pytest.mark.parametrize("settings", SETTINGS)
def test_calls_go_to_the_current_stream_and_wait_for_nothing(settings):
    """The stream sleeps while Q arrives on it and the call is made: who reads Q earlier reads NaN."""
    fresh = tensors(grad=True)
    wanted = with_gradients(*fresh, **settings)
    late = [torch.full_like(tensor, torch.nan).requires_grad_() for tensor in fresh]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # a quarter of a second
        with torch.no_grad():
            for tensor, values in zip(late, fresh):
                tensor.copy_(values)
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = with_gradients(*late, **settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        done = stream.record_event()
    assert not done.query()  # the host is here before the stream is
    done.synchronize()
    assert all(map(torch.equal, results, wanted))


def test_memory_comes_from_torchs_allocator_alone():
    """And only as much as the results, the order and the copy of K that a fusion needs; it all goes back."""
    q, k, v = tensors(n=16384)  # large beside what the split over keys needs, which depends on the GPU alone
    for _ in range(2):  # kernels are loaded, and torch's allocator has its memory
        attention(q, k, v, strategy="lsh")
    torch.cuda.synchronize()
    free, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        attention(q, k, v, strategy="lsh")
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free and torch.cuda.memory_allocated() == allocated
    bytes_of_one = q.numel() * q.element_size()
    assert torch.cuda.max_memory_allocated() - allocated < 4 * bytes_of_one


def test_out_of_memory_is_said_and_survived():
    q, k, v = tensors(n=64)
    wide = q[:, :, :1].expand(2, 4, 1 << 20, 64)  # an output of 1 GiB
    wanted = attention(q, k, v)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 27)) / total)
    try:
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            attention(wide, k, v, strategy="lsh")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(attention(q, k, v), wanted)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_captured_graph_repeats_the_step(settings, dtype):
    """Grouping, forward and backward in one graph, replayed with other values: with the bits of eager calls."""
    static = tensors(dtype=dtype, grad=True)
    graph, captured = capture(lambda: with_gradients(*static, **settings))
    seen = []
    for _ in range(2):
        fresh = tensors(dtype=dtype, grad=True)
        with torch.no_grad():
            for tensor, values in zip(static, fresh):
                tensor.copy_(values)
        graph.replay()
        seen.append(captured[0].clone())
        assert all(map(torch.equal, captured, with_gradients(*fresh, **settings)))
    assert not torch.equal(*seen)


@pytest.mark.parametrize("settings", SETTINGS)
def test_compile_whole_graph_with_dynamic_shapes(settings):
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, n in ((2, 70), (3, 150), (4, 41)):
            q, k, v = tensors(n, batch, grad=True)
            results = []
            for function in (attention, compiled):
                out = function(q, k, v, **settings)
                results.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
            assert all(map(torch.equal, *results))


def test_compile_with_inductor_and_cuda_graphs():
    torch._dynamo.reset()

    def function(x):
        q, k, v = x.unflatten(2, (3, 4, 64)).permute(2, 0, 3, 1, 4).unbind(0)
        return attention(q, k, v, strategy="lsh").transpose(1, 2).flatten(2) + x[..., :256]

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # eager, recorded, replayed
        x = torch.randn(2, 300, 768, device=DEVICE, dtype=BF16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast_casts_as_sdpa(dtype):
    for input_dtype in (torch.float32, BF16):
        q, k, v = tensors(dtype=input_dtype, grad=True)
        mask = torch.randn(500, 500, device=DEVICE)
        with torch.autocast("cuda", dtype=dtype):
            out = attention(q, k, v, attn_mask=mask, strategy="exact")
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
            mixed = attention(q, k.to(BF16), v.float(), attn_mask=mask, strategy="exact")
        assert out.dtype == mixed.dtype == expected.dtype == dtype
        cast = [tensor.to(dtype) for tensor in (q, k, v, mask)]
        assert torch.equal(out, attention(*cast[:3], attn_mask=cast[3], strategy="exact"))
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
        out.float().sum().backward()
        assert q.grad.dtype == input_dtype


def test_flash_functions_and_lengths_on_the_gpu():
    q, k, v = (torch.randn(70, 4, 64, device=DEVICE, dtype=BF16) for _ in range(3))
    starts = torch.tensor([0, 25, 70], dtype=torch.int32, device=DEVICE)
    out = distrattention.flash_attn_varlen_func(q, k, v, starts, starts, 45, 45, causal=True, strategy="exact")
    for begin, end in ((0, 25), (25, 70)):
        one = (tensor[None, begin:end] for tensor in (q, k, v))
        alone = distrattention.flash_attn_func(*one, causal=True, strategy="exact")[0]
        torch.testing.assert_close(out[begin:end], alone, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("lengths", [((25, 0, 130, 3), (40, 7, 90, 0)), ((300, 1, 0, 129), (290, 64, 3, 257))])
@pytest.mark.parametrize("window", [(-1, -1), (70, 20)])
@pytest.mark.parametrize("causal", [False, True])
# So few rows are sm80/sequences' on Hopper at 64, and sm80/backward's in bf16 where causal, but for windows.
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_packed_sequences_are_each_by_itself_with_gradients(causal, dtype, dim, window, lengths):
    lengths_q, lengths_k = lengths
    starts = [torch.tensor([0, *torch.tensor(of).cumsum(0)], dtype=torch.int32, device=DEVICE)
              for of in (lengths_q, lengths_k)]  # fmt: skip
    q = torch.randn(sum(lengths_q), 8, dim, device=DEVICE, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(sum(lengths_k), 2, dim, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(2))
    longest = max(lengths_q), max(lengths_k)
    options = dict(causal=causal, window_size=window, return_attn_probs=True)
    out, lse, _ = distrattention.flash_attn_varlen_func(q, k, v, *starts, *longest, **options)
    parts = [
        distrattention.flash_attn_func(*(x[None] for x in part), **options)
        for part in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    ]
    alone, lse_alone = torch.cat([part[0][0] for part in parts]), torch.cat([part[1][0] for part in parts], 1)
    close = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)
    torch.testing.assert_close(out, alone, **close)
    torch.testing.assert_close(lse, lse_alone, **close)
    weight = torch.randn_like(out)
    grads = [torch.autograd.grad((of * weight).sum(), (q, k, v)) for of in (out, alone)]
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, **{key: 3 * value for key, value in close.items()})


def test_packed_sequences_are_captured_and_replayed_with_other_lengths():
    q, k, v = (torch.randn(600, heads, 128, device=DEVICE, dtype=BF16, requires_grad=True) for heads in (8, 2, 2))
    starts = torch.tensor([0, 250, 251, 600], dtype=torch.int32, device=DEVICE)

    def step():
        out = distrattention.flash_attn_varlen_func(q, k, v, starts, starts, 600, 600, causal=True)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    graph, captured = capture(step)
    for others in ([0, 250, 251, 600], [0, 0, 400, 600]):
        starts.copy_(torch.tensor(others, dtype=torch.int32))
        graph.replay()
        for one, other in zip(captured, step()):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_lengths_out_of_range_are_clamped_on_the_gpu():
    q, k, v = (torch.randn(2, rows, heads, 64, device=DEVICE, dtype=BF16) for rows, heads in ((1, 8), (90, 2), (90, 2)))
    wrong, right = ([-5, 1000], [0, 90])
    found = [
        distrattention.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        )
        for lengths in (wrong, right)
    ]
    assert torch.equal(*found) and (found[0][0] == 0).all()


def test_a_step_against_a_cache_is_captured_and_replayed_with_other_lengths():
    q, new_k, new_v = (torch.randn(2, 1, heads, 64, device=DEVICE, dtype=BF16) for heads in (8, 2, 2))
    caches = [torch.randn(2, 300, 2, 64, device=DEVICE, dtype=BF16) for _ in range(2)]
    lengths = torch.tensor([100, 250], dtype=torch.int32, device=DEVICE)

    def step():
        return distrattention.flash_attn_with_kvcache(q, *caches, new_k, new_v, cache_seqlens=lengths, causal=True)

    graph, out = capture(step)
    for counts in ([7, 299], [299, 31]):
        lengths.copy_(torch.tensor(counts))
        graph.replay()
        for b, count in enumerate(counts):
            filled = (cache[b : b + 1, : count + 1] for cache in caches)
            one = distrattention.flash_attn_func(q[b : b + 1], *filled, strategy="exact")
            torch.testing.assert_close(out[b : b + 1], one, atol=1e-2, rtol=1e-2)


def test_sink_logits_on_the_gpu():
    q, k, v = (torch.randn(2, 4, 300, 64, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3))
    logits = torch.randn(4, device=DEVICE, requires_grad=True)
    found = attention(q, k, v, is_causal=True, strategy="exact", sink_logits=logits)
    hidden = ~torch.ones(300, 300, dtype=torch.bool, device=DEVICE).tril()
    scores = (q @ k.mT * 0.125).float().masked_fill(hidden, -torch.inf)
    both = torch.cat((scores, logits[:, None, None].expand(2, 4, 300, 1)), -1)
    wanted = both.softmax(-1)[..., :-1].to(BF16) @ v
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    weight = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad(out, (logits, v), weight) for out in (found, wanted))):
        torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)


def relative(found, expected):
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def models():
    """(name, model, a function that runs it): small ones in bfloat16, with weights of a spread that shows changes."""
    timm = pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2))
    bert = transformers.BertModel(
        transformers.BertConfig(**sizes, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    )
    vit = timm.models.vision_transformer.VisionTransformer(
        img_size=96, patch_size=8, embed_dim=256, depth=2, num_heads=4, num_classes=10
    )
    tokens = torch.randint(1000, (2, 160), device=DEVICE)
    padding = torch.ones_like(tokens)
    padding[0, :20] = 0
    images = torch.randn(2, 3, 96, 96, device=DEVICE, dtype=BF16)
    runs = {
        "llama": (llama, lambda model: model(tokens, attention_mask=padding).logits[:, 20:]),
        "bert": (bert, lambda model: model(tokens, attention_mask=padding).last_hidden_state[:, 20:]),
        "vit": (vit, lambda model: model(images)),
    }
    for name, (model, run) in runs.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        yield name, model.to(DEVICE, BF16).eval(), run


def test_models_through_replace_sdpa_and_the_integrations():
    """Exact attention is torch's own up to bfloat16's rounding, an approximation is not; gradients flow."""
    from distrattention.integrations.timm import replace_attention
    from distrattention.integrations.transformers import register

    register("distr_cuda", strategy="exact")
    register("distr_cuda_lsh", strategy="lsh", group_size=4)
    for name, model, run in models():
        with torch.no_grad():
            expected = run(model)
            with replace_sdpa(strategy="exact"):
                replaced = run(model)
            with replace_sdpa(strategy="lsh", group_size=4):
                approximate = run(model)
            if name == "vit":
                assert replace_attention(model, strategy="exact") == 2
                integrated = run(model)
                replace_attention(model, strategy="lsh", group_size=4)
                integrated_lsh = run(model)
            else:
                model.set_attn_implementation("distr_cuda")
                integrated = run(model)
                model.set_attn_implementation("distr_cuda_lsh")
                integrated_lsh = run(model)
        rounding = max(relative(replaced, expected), relative(integrated, expected))
        change = min(relative(approximate, expected), relative(integrated_lsh, expected))
        assert rounding < 0.05 and change > 3 * rounding, (name, rounding, change)
        run(model).float().square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert len(grads) > 10 and all(grad.isfinite().all() for grad in grads), name


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("settings", [{"strategy": "exact"}, {"strategy": "energy", "group_size": 2, "window": 100}])
def test_a_sliding_window_that_a_mask_shows_takes_its_place(settings, padded, monkeypatch):
    """With padding the mask shows more than the window, and stays. All that the window shows is near."""
    transformers = pytest.importorskip("transformers")
    from distrattention.integrations import transformers as integration

    integration.register("distr_window", **settings)
    sizes = dict(vocab_size=50, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.MistralConfig(**sizes, num_key_value_heads=1, sliding_window=100)
    model = transformers.MistralForCausalLM(config).to(DEVICE).eval()
    prompt = torch.randint(0, 50, (2, 400), device=DEVICE)
    seen = torch.ones_like(prompt)
    seen[1, : 30 * padded] = 0
    given, attend = [], integration.attention_of_prompts

    def noted(*tensors, **options):
        given.append((options["attn_mask"] is None, options["window_size"]))
        return attend(*tensors, **options)

    monkeypatch.setattr(integration, "attention_of_prompts", noted)
    outputs = {}
    with torch.no_grad():
        for name in ("eager", "distr_window"):
            model.set_attn_implementation(name)
            outputs[name] = model(prompt, attention_mask=seen).logits[seen.bool()]
    assert set(given) == {(not padded, None if padded else (99, 0))}
    torch.testing.assert_close(outputs["distr_window"], outputs["eager"], atol=1e-4, rtol=1e-3)



def test_generation_with_a_cache():
    transformers = pytest.importorskip("transformers")
    from distrattention.integrations.transformers import register

    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).to(DEVICE).eval()
    prompt = torch.randint(1000, (2, 160), device=DEVICE)
    arguments = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    expected = model.generate(prompt, **arguments)
    register("distr_cuda", strategy="exact")
    model.set_attn_implementation("distr_cuda")
    assert torch.equal(model.generate(prompt, **arguments), expected)

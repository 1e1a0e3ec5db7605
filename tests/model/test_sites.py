import pytest
import torch

from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.errors import Tripwire
from fathom.model.observe import sites
from fathom.model.observe.observer import Observer, Place, Point, listening, not_shown, observed
from fathom.model.observe.sites import SITES, STEPS, Site
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions


@pytest.fixture(scope="module")
def model():
    return load(DEMO, RunOptions()).model


def ran(model, tokens=300):
    state = model.new_state(512, 512)
    return model.logits(model(torch.arange(tokens) % 1024, state)[-1:])


def test_every_site_is_passed_in_the_order_of_the_list_with_the_shape_it_states(model):
    passed = []
    with listening(model, {site: lambda layer, _, site=site: passed.append((layer, site)) for site in SITES}):
        ran(model)
    assert {site for _, site in passed} == set(SITES)
    for layer in range(model.config.num_hidden_layers):
        seen = [site for where, site in passed if where == layer]
        # one routed expert after the other passes its gate and up; all else is passed once, in order
        once = list(dict.fromkeys(seen))
        assert once == [site for site in SITES if site in once]
    assert {site for layer, site in passed if layer is None} == {sites.EMBEDDED, sites.HIDDEN, sites.LOGITS}


def test_names_are_unique():
    assert len({site.name for site in SITES}) == len(SITES)


def test_layers_pass_the_sites_of_their_kind_only(model):
    layers = {site: set() for site in (sites.STREAMS, sites.ENTRY, sites.SELECTED)}
    with listening(model, {site: lambda layer, _, site=site: layers[site].add(layer) for site in layers}):
        ran(model)
    assert layers == {sites.STREAMS: {0, 1, 2, 3}, sites.ENTRY: {1, 2, 3}, sites.SELECTED: {1, 3}}


def test_watching_changes_nothing(model):
    bare = ran(model)
    with listening(model, {site: lambda *_: None for site in SITES}):
        assert torch.equal(ran(model), bare)


@pytest.mark.parametrize("error", [None, ValueError])
def test_listeners_are_gone_after_the_with_whatever_happened_in_it(model, error):
    heard = []

    def listen():
        with listening(model, {sites.HIDDEN: lambda _, x: heard.append(x.shape)}):
            ran(model, 5)
            if error is not None:
                raise error

    if error is None:
        listen()
    else:
        with pytest.raises(error):
            listen()
    assert heard == [(5, 128)]
    ran(model, 5)
    assert heard == [(5, 128)]
    assert not observed(model).listening


def test_one_listener_of_two_may_go(model):
    heard = []
    with listening(model, {sites.HIDDEN: lambda *_: heard.append("outer")}):
        with listening(model, {sites.HIDDEN: lambda *_: heard.append("inner")}):
            ran(model, 3)
        ran(model, 3)
    assert heard == ["outer", "inner", "outer"]


@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 1), (4,), ()])
def test_a_tensor_of_another_shape_than_its_site_says_trips(model, shape):
    observer, site = Observer(model.config, model.arithmetic.ranks), Site("here", "t s", "")
    point = Point(2, ((site, Place("", "")),))
    with observer.attached({site: lambda *_: None}):
        observer.passes(point, None, (), torch.zeros(7, 4))
        with pytest.raises(Tripwire, match="here of layer 2: shape") as trip:
            observer.passes(point, None, (), torch.zeros(shape))
    assert trip.value.expected == "[t, s] = [-1, 4]"


def test_what_a_listener_writes_is_what_the_caches_keep(model):
    state = model.new_state(300, 300)
    kept = (sites.KV, sites.ENTRY, sites.INDEX_KEY_USED)
    with listening(model, {site: lambda _, rows: rows.fill_(0.5) for site in kept}):
        model(torch.arange(300) % 1024, state)
    for cache, entries in zip(state.layers, (0, 75, 2, 75), strict=True):
        assert (cache.ring.data[:300] == 0.5).all()
        if entries:
            assert (cache.entries.data[:entries] == 0.5).all()
        if entries == 75:
            assert (cache.keys.data[:entries] == 0.5).all()


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=lambda ops: ops.name)
def test_steps_are_on_the_way_to_their_sites_to_the_bit(ops):
    """And listening changes nothing; experts alone are then run one by one."""
    model, passed = load(DEMO, RunOptions(), ops=ops).model, {}
    silent = ran(model, 40)

    def keep(site):
        return lambda layer, x: passed.setdefault((layer, site), x.clone())

    shown = [site for site in STEPS if site not in not_shown(ops.name)]
    assert set(STEPS) - set(shown) == {sites.WEIGHTS}
    inside = {sites.EXPERTS_GATE, sites.EXPERTS_UP}
    with listening(
        model, {site: keep(site) for site in {*SITES, *shown} - {*inside, sites.ROUTED_GATE, sites.ROUTED_UP}}
    ):
        assert torch.equal(ran(model, 40), silent)
    for layer, block in enumerate(model.blocks):
        attention, moe = block.attention, block.experts
        latent = ops.rms_norm(passed[layer, sites.LATENT_UNNORMED], attention.q_norm, attention.eps)
        assert torch.equal(latent, passed[layer, sites.LATENT])
        angles = model.call(torch.arange(40), 0).angles(attention.rotation)
        assert torch.equal(ops.rotate(passed[layer, sites.QUERY_UNROTATED], *angles), passed[layer, sites.QUERY])
        kv = ops.norm_rotate(
            passed[layer, sites.KV_UNNORMED], attention.kv_norm, attention.eps, *angles, model.arithmetic.kv_group
        )
        assert torch.equal(kv, passed[layer, sites.KV])
        weights = ops.route_weights(passed[layer, sites.EXPERT_LOGITS], passed[layer, sites.EXPERT_IDS], moe.gate.scale)
        assert torch.equal(weights, passed[layer, sites.EXPERT_WEIGHTS])
    key = passed[1, sites.INDEX_KEY_UNROTATED]
    cos, sin = model.call(torch.arange(40), 0).angles_of_windows(model.blocks[1].attention.rotation, 0, 10, 4)
    assert torch.equal(ops.rotate(key, cos, sin), passed[1, sites.INDEX_KEY])
    with listening(model, {sites.EXPERTS_UP: keep(sites.EXPERTS_UP)}):
        ran(model, 40)
    assert passed[2, sites.EXPERTS_UP].shape[:2] == passed[2, sites.EXPERT_IDS].shape


def test_what_fused_kernels_have_in_no_memory_is_not_shown():
    hidden = {site.name for site in not_shown("triton")}
    assert hidden == {
        *("attention.weights", "attention.query_unrotated", "attention.kv_unrotated", "attention.entry_unrotated"),
        *("indexer.key_unrotated", "experts.logits"),
    }

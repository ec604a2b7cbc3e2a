"""Names of activations that a remat policy can save or offload; the policies are in `models/remat.py`."""

LAYER_INPUT = "layer_input"
QUERIES = "queries"
KEYS = "keys"
VALUES = "values"
ATTENTION_OUT = "attention_out"
OUT_PROJECTION = "out_projection"
MLP_GATE = "mlp_gate"
MLP_UP = "mlp_up"
MLP_HIDDEN = "mlp_hidden"
MLP_DOWN = "mlp_down"

TAGS = {
    LAYER_INPUT: "the residual stream as it enters the layer [b s d]",
    QUERIES: "queries after QK norm and RoPE [b s h c]",
    KEYS: "keys after QK norm and RoPE [b t k c]",
    VALUES: "values [b t k c]",
    ATTENTION_OUT: "weighted sums of values, before the output projection [b s h c]",
    OUT_PROJECTION: "output of attention, added to the residual stream [b s d]",
    MLP_GATE: "gate before its SiLU [b s f]",
    MLP_UP: "up projection, multiplied by the gate [b s f]",
    MLP_HIDDEN: "gate times up, before the down projection [b s f]",
    MLP_DOWN: "output of the feed-forward layer, added to the residual stream [b s d]",
}

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
    QUERIES: "queries after norm and rotation [b s h c]",
    KEYS: "keys after norm and rotation [b t k c]",
    VALUES: "values [b t k c]",
    ATTENTION_OUT: "result of attention, before the output projection [b s h c]",
    OUT_PROJECTION: "what attention adds to the residual stream [b s d]",
    MLP_GATE: "gate before its SiLU [b s f]",
    MLP_UP: "what the gate multiplies [b s f]",
    MLP_HIDDEN: "gate times up, before the down projection [b s f]",
    MLP_DOWN: "what the feed-forward layer adds to the residual stream [b s d]",
}

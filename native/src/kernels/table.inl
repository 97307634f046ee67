// The table of one instruction set's kernels. Include after the others, with SLIP_TABLE and SLIP_NAME defined.
namespace slip {
extern const Kernels SLIP_TABLE;
const Kernels SLIP_TABLE = {
    SLIP_NAME, ::linear, ::prepare, ::rmsnorm, ::add, ::gated, ::rope, ::round_bf16, ::kv_write, ::attend,
    ::merge, ::scale, ::softcap, ::argmax, ::argmax_noise, ::token_noise, ::sum_exp, ::read_bytes, ::burn,
};
}  // namespace slip

// A kernel that cannot keep its values in the registers that its bounds leave: it must spill.
extern "C" __global__ void __launch_bounds__(1024, 1) spills(float* values, int steps) {
    float kept[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) {
        kept[i] = values[i * 1024 + threadIdx.x];
    }
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int i = 0; i < 128; ++i) {
            kept[i] = kept[i] * kept[(i + 37) % 128] + static_cast<float>(step);
        }
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) {
        values[i * 1024 + threadIdx.x] = kept[i];
    }
}

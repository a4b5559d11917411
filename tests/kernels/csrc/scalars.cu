// Writes its parameters, converted to double, in their order.
using i64 = long long;

struct Fields {
    int small;
    i64 large;
    float fraction;
    double* out;
    int last;
};

extern "C" __global__ void scalars(int first, const __grid_constant__ Fields fields, i64 large,
                                   float fraction) {
    const double values[] = {
        static_cast<double>(first),         static_cast<double>(fields.small),
        static_cast<double>(fields.large),  static_cast<double>(fields.fraction),
        static_cast<double>(fields.last),   static_cast<double>(large),
        static_cast<double>(fraction),
    };
    for (int i = 0; i < 7; ++i) {
        fields.out[i] = values[i];
    }
}

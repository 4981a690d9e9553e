/* What the AMX kernels share: tiles are 16 rows of 64 bytes, and bfloat16 travels as its bits. */

#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;

static void configure_tiles(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = 16;
  _tile_loadconfig(&config);
}

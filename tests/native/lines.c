/* lines.c -- mode noncoherent on ordinary memory: every set of instructions this CPU has runs, and no value changes. */
#include "tests/native/bottom.h"

enum { BYTES = 1 << 20, ROUNDS = 20000 };

static struct kvp_mapping memory;

static void test_words(void)
{
    for (uint64_t i = 0; i < 4096; i++) {
        nc_u64 *word = word_at(&memory, i * 24 & ~7ull);
        uint64_t seen = i;
        nc_store(word, i);
        nc_write_back(word, 8);
        nc_write_fence(); /* before the next round's stores: here only to run it */
        nc_invalidate(word, 8);
        nc_read_fence(); /* the load after the invalidate */
        REQUIRE(nc_load(word) == i, "word %llu", (unsigned long long)i);
        REQUIRE(nc_cas(word, &seen, i + 1) && nc_load(word) == i + 1, "cas");
    }
    nc_write_back(memory.base, BYTES);
    nc_invalidate(memory.base + 1, 0);
    nc_invalidate(memory.base, BYTES);
    nc_full_fence(); /* as above */
}

/* Heads, streamed bodies and tails of all alignments, and not a byte beyond. */
static void test_copies(void)
{
    static const uint64_t length[] = {0, 1, 63, 64, 65, 4095, 4096, 4097, 8191, 70000};
    static uint8_t from[70000], to[70000];

    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)mix(i);
    for (size_t l = 0; l < sizeof length / sizeof *length; l++)
        for (uint64_t offset = 0; offset < 130; offset += 13) {
            uint8_t *at = memory.base + 4096 + offset;
            memset(memory.base, 0xee, 4096 + 256 + sizeof from);
            kvp_copy_in(at, from, length[l]);
            nc_write_fence(); /* the copy before what would say that it is there */
            nc_invalidate(at, length[l]);
            nc_full_fence(); /* loads after the invalidate */
            memset(to, 0, sizeof to);
            kvp_copy_out(to, at, length[l]);
            REQUIRE(memcmp(from, to, length[l]) == 0, "%llu bytes at %llu", (unsigned long long)length[l],
                    (unsigned long long)offset);
            REQUIRE(at[-1] == 0xee && at[length[l]] == 0xee, "around %llu bytes", (unsigned long long)length[l]);
        }
}

static void *send(void *unused)
{
    (void)unused;
    for (uint64_t i = 1; i <= ROUNDS; i++) {
        for (int w = 0; w < 16; w++)
            nc_store(word_at(&memory, 8 * (uint64_t)w), i);
        nc_write_back(memory.base, 128);
        nc_write_fence(); /* the data before the flag */
        nc_store(word_at(&memory, 4096), i);
        nc_write_back(word_at(&memory, 4096), 8);
    }
    return NULL;
}

static void test_message(void)
{
    pthread_t sender;
    uint64_t flag = 0;

    nc_store(word_at(&memory, 4096), 0);
    REQUIRE(pthread_create(&sender, NULL, send, NULL) == 0, "no thread");
    while (flag < ROUNDS) {
        nc_invalidate(word_at(&memory, 4096), 8);
        nc_invalidate(memory.base, 128);
        nc_full_fence(); /* the loads after their invalidates */
        flag = nc_load(word_at(&memory, 4096));
        for (int w = 0; w < 16; w++)
            REQUIRE(nc_load(word_at(&memory, 8 * (uint64_t)w)) >= flag, "data older than its flag");
    }
    pthread_join(sender, NULL);
}

int main(void)
{
    static const char *const sets[] = {"clwb+clflushopt", "clwb+clflush", "clflushopt", "clflush", "dc cvac+dc civac"};
    char chosen[40];
    int ran = 0;

    snprintf(chosen, sizeof chosen, "%s", kvp_line_instructions());
    MUST(kvp_mapping_create("memfd:", BYTES, &memory));
    MUST(kvp_mapping_attach(&memory, 5)); /* nothing to do */
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        if (kvp_line_choose(sets[i]))
            continue;
        REQUIRE(strcmp(kvp_line_instructions(), sets[i]) == 0, "not chosen");
        test_words();
        test_copies();
        test_message();
        ran++;
    }
    REQUIRE(ran > 0 && kvp_line_choose("wbinvd") == KVP_E_INVALID, "a set that is none");
    REQUIRE(kvp_line_bytes() >= KVP_LINE, "%u bytes", kvp_line_bytes());
    struct kvp_sim_counts counts;
    REQUIRE(kvp_sim_counts_read(&memory, &counts) == KVP_E_INVALID && counts.loads == 0, "nothing is simulated");
    REQUIRE(kvp_sim_lose_host("sim:x", 0) == KVP_E_INVALID, "nothing is simulated");
    REQUIRE(kvp_mapping_open("sim:x", &memory) == KVP_E_INVALID && strstr(kvp_error_detail(), "mode='sim'"), "no hint");
    printf("%s chosen, %d sets ran\n", chosen, ran);
    return 0;
}

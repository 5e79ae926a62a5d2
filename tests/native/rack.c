/* rack.c -- a simulated rack: hosts of worker processes on one pool, killed as a seed has it; nothing is lost, nothing
 * leaks, no byte is wrong and nobody is blocked.
 *
 *   rack [SECONDS] [SEED] [CLASSES]
 *
 * The seed draws what each worker does, where it dies, which hosts are lost when and come back how, and what the caches
 * do by themselves. The workers run freely in between, so a seed is a set of histories, not one.
 *
 * Rounds of some seconds. In each, workers do verbs at random and die; hosts are killed, lost with their caches, fenced and
 * adopted, restarted, stopped for longer than their lease. Then all are quiet, and everything is looked at.
 */
#define _GNU_SOURCE
#include "tests/native/rack_seats.h"

/* ---- what happens to hosts ---- */

static uint32_t hosts_down(void)
{
    uint32_t down = 0;

    for (uint32_t h = 0; h < HOSTS; h++)
        down += hosts[h].plan != UP;
    return down;
}

static int is_adopter(uint32_t host)
{
    for (uint32_t h = 0; h < HOSTS; h++)
        if (hosts[h].plan == FENCED && !hosts[h].is_adopted && hosts[h].adopter == host)
            return 1;
    return 0;
}

static void signal_host(uint32_t host, int number)
{
    for (uint32_t i = host * WORKERS; i < (host + 1) * WORKERS; i++) {
        respawn_at[i] = 0;
        if (rack->seats[i].pid)
            kill(rack->seats[i].pid, number);
    }
}

static void lose_cache(uint32_t host)
{
    int64_t lost = KVP_E_BUSY;

    while (speaker(host))
        tick();
    for (int tries = 0; tries < TRIES && lost == KVP_E_BUSY; tries++) {
        lost = kvp_pool_lose_host(rack->uri, host);
        if (lost == KVP_E_BUSY)
            tick();
    }
    if (lost < 0 && lost != KVP_E_NOTFOUND)
        give_up("host %u cannot be reset: %lld %s", host, (long long)lost, kvp_error_detail());
    lost_lines += lost > 0 ? (uint64_t)lost : 0;
}

static uint32_t draw_adopter(uint32_t lost)
{
    uint32_t h = (uint32_t)roll(HOSTS);

    while (h == lost || hosts[h].plan != UP)
        h = (h + 1) % HOSTS;
    return h;
}

static void strike_host(uint32_t h)
{
    struct host *host = &hosts[h];
    enum plan choices[] = {KILLED, LOST, LOST, FENCED, FENCED, STOPPED};

    host->plan = choices[roll(sizeof choices / sizeof *choices)];
    if (KVP_MODE != KVP_SIM && host->plan != STOPPED)
        host->plan = KILLED; /* the cache of a real machine cannot be taken away */
    events[host->plan]++;
    note("host %u is %s", h, plan_names[host->plan]);
    if (host->plan == STOPPED) {
        signal_host(h, SIGSTOP);
        host->until = seconds() + LEASE_S * (1.2 + 0.1 * (double)roll(20));
        return;
    }
    signal_host(h, SIGKILL);
    if (host->plan != KILLED)
        lose_cache(h);
    host->until = seconds() + (roll(3) ? 0.001 * (double)roll(1200) : 0);
    if (host->plan == FENCED) {
        host->until = seconds() + LEASE_S * 1.3;
        host->adopter = draw_adopter(h);
        host->is_adopted = 0;
        host->asked = NULL;
    }
}

/* The site has named the adopter: any worker of it will do, and the next one if that dies. */
static void see_to_adoption(uint32_t h)
{
    struct host *host = &hosts[h];

    if (!host->asked) {
        if (hosts[host->adopter].plan != UP)
            return; /* it comes back, or is fenced in turn: then another is named */
        struct seat *at = &rack->seats[host->adopter * WORKERS + roll(WORKERS)];
        if (!at->pid || shared_load(&at->done) != at->serial)
            return;
        host->asked = at;
        host->serial = give_order(at, ORDER_FENCE, h);
        return;
    }
    if (shared_load(&host->asked->done) == host->serial && host->asked->pid && host->asked->answer >= 0) {
        note("host %u adopts %lld segments of host %u", host->adopter, (long long)host->asked->answer, h);
        adopted_segments += (uint64_t)host->asked->answer;
        host->is_adopted = 1;
        host->until = seconds() + (roll(2) ? 0.001 * (double)roll(800) : 0);
    }
    if (!host->asked->pid || shared_load(&host->asked->done) == host->serial)
        host->asked = NULL;
}

static void bring_back(uint32_t h)
{
    note("host %u is back", h);
    if (hosts[h].plan == STOPPED)
        signal_host(h, SIGCONT);
    hosts[h].plan = UP;
    for (uint32_t i = h * WORKERS; i < (h + 1) * WORKERS; i++)
        if (!rack->seats[i].pid)
            respawn_at[i] = seconds() + (roll(2) ? 0.001 * (double)roll(50) : 0);
}

static void move_hosts(void)
{
    for (uint32_t h = 0; h < HOSTS; h++) {
        if (hosts[h].plan == UP || seconds() < hosts[h].until)
            continue;
        if (hosts[h].plan == FENCED && !hosts[h].is_adopted)
            see_to_adoption(h);
        else if (hosts[h].plan == STOPPED || !speaker(h))
            bring_back(h);
    }
}

/* ---- rounds ---- */

static void draw_round(void)
{
    static const uint32_t usual[VERBS] = {10, 12, 20, 10, 14, 3, 4, 3, 2, 3, 4, 1};

    rack->round++;
    rack->is_roomy = roll(3) == 0;
    rack->crash_odds = roll(5) ? 100u << roll(5) : 0;
    rack->weights = 0;
    for (int v = 0; v < VERBS; v++) {
        uint32_t weight = usual[v] << roll(3);
        rack->weight[v] = rack->is_roomy && (v == SHRINK || v == REMOVE || v == GIVE) ? 0 : weight;
        rack->weights += rack->weight[v];
    }
}

/* Room for every key on every host: all is evicted, and who has too few segments gets some. */
static void make_room_for_all(void)
{
    int64_t owned[HOSTS], enough = rack->segments / HOSTS * 7 / 8;

    ask_hosts(ORDER_EMPTY);
    for (uint32_t h = 0; h < HOSTS; h++)
        owned[h] = ask_host(h, ORDER_SETTLE, 0);
    for (uint32_t from = 0; from < HOSTS; from++)
        for (uint32_t to = 0; to < HOSTS; to++) {
            int64_t n = owned[from] - enough < enough - owned[to] ? owned[from] - enough : enough - owned[to];
            if (n <= 0)
                continue;
            n = ask_host(from, ORDER_GIVE, (uint32_t)n << 8 | to);
            owned[from] -= n, owned[to] += n;
        }
    ask_hosts(ORDER_SETTLE);
}

/* One owner for every segment, nobody dead who is not recovered, nothing on its way. */
static int is_settled(void)
{
    uint32_t unsettled = 0;

    for (uint32_t h = 0; h < HOSTS; h++)
        unsettled += rack->standing[h].moving + rack->standing[h].dead;
    for (uint32_t s = 0; s < rack->segments; s++) {
        uint32_t owners = 0;
        for (uint32_t h = 0; h < HOSTS; h++)
            owners += rack->standing[h].is_ours[s];
        if (owners != 1)
            unsettled++;
    }
    return unsettled == 0;
}

static void describe_unsettled(void)
{
    for (uint32_t h = 0; h < HOSTS; h++) {
        fprintf(stderr, "host %u: %u on the move, %u dead, owns", h, rack->standing[h].moving, rack->standing[h].dead);
        for (uint32_t s = 0; s < rack->segments; s++)
            if (rack->standing[h].is_ours[s])
                fprintf(stderr, " %u", s);
        fprintf(stderr, "\n");
    }
}

static void settle_all(void)
{
    double deadline = seconds() + BLOCKED_S;

    for (int calm = 0; calm < 3;) {
        for (uint32_t h = 0; h < HOSTS; h++)
            ask_host(h, ORDER_SETTLE, 0);
        calm = is_settled() ? calm + 1 : 0;
        if (seconds() > deadline) {
            describe_unsettled();
            give_up("segments do not settle");
        }
    }
}

/* A block has one owner at most; none if the line of its word lies across two. */
static void account_for_blocks(void)
{
    uint64_t ours = 0, counted = 0, all = 0;

    for (uint32_t c = 0; c < rack->classes; c++)
        all += rack->blocks[c];
    for (uint32_t i = 0; i < rack->classes * BLOCKS_MAX; i++) {
        uint64_t owners = rack->noted[i / BLOCKS_MAX][i % BLOCKS_MAX].owners;
        if (owners & (owners - 1))
            give_up("block %u of class %u has owners %#llx", i % BLOCKS_MAX, i / BLOCKS_MAX, (unsigned long long)owners);
        ours += owners != 0;
    }
    for (uint32_t h = 0; h < HOSTS; h++)
        for (int state = 0; state < KVP_STATES; state++)
            counted += rack->standing[h].states[state];
    if (ours != counted || (rack->classes == 1 && ours != all)) /* with one class a segment is whole lines */
        give_up("%llu blocks have an owner, %llu were counted, of %llu", (unsigned long long)ours, (unsigned long long)counted,
                (unsigned long long)all);
}

static int is_noted(uint64_t id)
{
    struct kvp_key key = key_of(id);

    for (uint32_t number = 0; number < BLOCKS_MAX; number++) {
        const struct noted *noted = &rack->noted[class_of(id)][number];
        if (noted->ref && noted->key.low == key.low && noted->key.high == key.high)
            return 1;
    }
    return 0;
}

/* Where nothing was evicted, what was confirmed stands. */
static void require_confirmed(uint64_t evictions)
{
    if (!rack->is_roomy || shared_load(&rack->evictions) != evictions)
        return;
    strict_rounds++;
    for (uint64_t id = 0; id < IDS; id++)
        if (shared_load(&rack->must[id]) == rack->round && !is_noted(id))
            give_up("key %llu was published and is lost", (unsigned long long)id);
}

static void require_clean_lines(void)
{
    for (uint32_t h = 0; KVP_MODE == KVP_SIM && h < HOSTS; h++) {
        const struct kvp_sim_counts *lines = &rack->standing[h].lines;
        if (lines->conflicts || lines->dirty_invalidated)
            give_up("%llu conflicts, last at %#llx; %llu dirty lines invalidated, last at %#llx",
                    (unsigned long long)lines->conflicts, (unsigned long long)lines->conflict_offset,
                    (unsigned long long)lines->dirty_invalidated, (unsigned long long)lines->dirty_invalidated_offset);
    }
}

static void inspect(uint64_t evictions)
{
    tell_everybody(ORDER_QUIET);
    settle_all();
    memset(rack->noted, 0, sizeof rack->noted);
    ask_hosts(ORDER_LOOK);
    account_for_blocks();
    require_confirmed(evictions);
    found_keys += (uint64_t)ask_hosts(ORDER_FIND);
    require_clean_lines();
}

/* A worker dies where it stands, or a host is struck. */
static void disturb(void)
{
    if (roll(40) == 0) {
        struct seat *at = &rack->seats[roll(SEATS)];
        if (at->pid && hosts[host_of(at)].plan == UP)
            kill(at->pid, SIGKILL), kills++;
    }
    if (roll(120) == 0 && hosts_down() < LOST_AT_ONCE) {
        uint32_t h = (uint32_t)roll(HOSTS);
        if (hosts[h].plan == UP && (!is_adopter(h) || roll(4) == 0))
            strike_host(h);
    }
}

static void run_round(double end)
{
    draw_round();
    if (rack->is_roomy)
        make_room_for_all();
    uint64_t evictions = shared_load(&rack->evictions);
    double stop = seconds() + 1.0 + 0.001 * (double)roll(2000);
    note("round %u%s", rack->round, rack->is_roomy ? ", roomy" : "");
    tell_everybody(ORDER_RUN);
    while (seconds() < stop && seconds() < end) {
        tick();
        disturb();
        move_hosts();
    }
    while (hosts_down()) {
        tick();
        move_hosts();
    }
    inspect(evictions);
}

/* ---- the whole ---- */

static void create(uint64_t number)
{
    struct kvp_request request = {.workers = SLOTS, .classes = rack->classes, .stride = {STRIDE, STRIDE_MAX}, .hosts = HOSTS,
                                  .lease_ms = LEASE_MS};
    char options[160];
    pid_t child;
    int how;

    request.bytes = rack->classes == 1 ? 0 : BYTES;
    request.blocks = rack->classes == 1 ? BLOCKS : 0;
    snprintf(rack->uri, sizeof rack->uri, "%s:rack-%d-%llu", KVP_MODE == KVP_SIM ? "sim" : "shm", (int)getpid(),
             (unsigned long long)number);
    int length = snprintf(options, sizeof options, "%s", rack->uri);
    if (KVP_MODE == KVP_SIM) /* caches that do little by themselves, and some that do much */
        snprintf(options + length, sizeof options - (size_t)length, "?seed=%llu&events=%llu", (unsigned long long)number,
                 1ull << roll(6));
    if ((child = fork()) == 0) {
        int status = kvp_pool_create(options, &request, "lru", &pool);
        REQUIRE(status == KVP_OK, "create %s: %s", options, kvp_strerror(status));
        rack->segments = pool->arena.layout.segments;
        for (uint32_t c = 0; c < rack->classes; c++)
            rack->blocks[c] = pool->arena.class[c].blocks;
        REQUIRE(rack->segments <= SEGMENTS && rack->blocks[0] <= BLOCKS_MAX, "the pool is too large for this test");
        kvp_pool_free(pool);
        _exit(0);
    }
    if (waitpid(child, &how, 0) != child || how)
        give_up("the pool cannot be made");
}

static void end_all(void)
{
    int how;

    ask_hosts(ORDER_EMPTY);
    settle_all();
    int64_t used = ask_hosts(ORDER_USE);
    if (rack->classes == 1 && used != BLOCKS)
        give_up("%lld of %d blocks can be used", (long long)used, BLOCKS);
    for (uint32_t i = 0; i < SEATS; i++) {
        struct seat *at = &rack->seats[i];
        give_order(at, ORDER_LEAVE, 0);
        if (waitpid(at->pid, &how, 0) != at->pid || how)
            give_up("worker %u of host %u cannot leave: %#x", i % WORKERS, i / WORKERS, how);
        at->pid = 0;
    }
    if (kvp_pool_remove(rack->uri, 0) != KVP_OK)
        give_up("the pool cannot be removed: %s", kvp_error_detail());
}

static void report(double spent)
{
    uint64_t verified = 0, operations = 0;

    for (uint32_t i = 0; i < SEATS; i++) {
        verified += rack->seats[i].verified;
        for (int v = 0; v < VERBS; v++)
            operations += rack->seats[i].count[v];
    }
    printf("seed %llu, classes %u: %u rounds in %.1f s, %llu operations, %llu payloads verified, %llu deaths (%llu by surprise), hosts killed "
           "%llu lost %llu fenced %llu stopped %llu, %llu segments adopted, %llu lines lost, %llu rounds without eviction, "
           "%llu keys found at rest\n", (unsigned long long)rack->seed, rack->classes, rack->round, spent, (unsigned long long)operations,
           (unsigned long long)verified, (unsigned long long)deaths, (unsigned long long)kills,
           (unsigned long long)events[KILLED], (unsigned long long)events[LOST], (unsigned long long)events[FENCED],
           (unsigned long long)events[STOPPED], (unsigned long long)adopted_segments, (unsigned long long)lost_lines,
           (unsigned long long)strict_rounds, (unsigned long long)found_keys);
    for (int i = 0; i < NAMES && rack->names[i]; i++)
        printf("passed %s\n", rack->names[i]);
}

int main(int argc, char **argv)
{
    double duration = argc > 1 ? strtod(argv[1], NULL) : 10;
    uint64_t number = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);

    rack = mmap(NULL, sizeof *rack, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    rack->seed = number;
    rack->is_quiet = 1;
    rack->classes = argc > 3 ? (uint32_t)atoi(argv[3]) : 1 + (uint32_t)(number % 3 == 0);
    snprintf(replay, sizeof replay, "rack %g %llu %u", duration, (unsigned long long)number, rack->classes);
    dice = mix(number + 4711);
    started = seconds();
    create(number);
    for (uint32_t i = 0; i < SEATS; i++)
        spawn(i);
    while (seconds() - started < duration)
        run_round(started + duration);
    end_all();
    report(seconds() - started);
    return 0;
}

/* lease.pml -- a lost host: lease, fence, the one adopter that the fence names, restart under a new incarnation.
 *
 * Host A owns a segment with one block in it: a word and a payload, each on a line of its own. A may be slow for any
 * time, is reset, cut off, rebooted. B and C read with pins, see A's lease expire, and one of them is named to
 * adopt. Nothing is coherent between hosts: every host has a copy of each line, a dirty copy may be written back at
 * any moment, a clean one dropped at any moment, and a reset loses what was not written back (or not: by choice).
 *
 * A step here is a call, or the part of one between two fences. What happens inside (store buffers, late
 * write-backs, missing fences) is checked on the C text itself by the explorer; this model checks who may do what,
 * and when.
 *
 *   step of the model            stands for, in C
 *   sees_expired                 coherence/hosts.c   kvp_host_*: the beat has not changed for a lease
 *   is_stale                     coherence/hosts.c   kvp_host_*: is my incarnation fenced? before each publication
 *   host_a, its beginning        coherence/hosts.c   kvp_host_*: join; a new incarnation for each boot
 *   authority                    the site's fence (power or fabric control): resets or cuts off, THEN names an adopter
 *   survivor: named, adopt       allocator/owners.c  kvp_owner_*: adoption under a higher owner epoch
 *   settle, evict, publish       allocator/blocks.c  recovery, kvp_evict_begin, kvp_evict_take, kvp_make_live
 *   read_in_place                allocator/pins.c    kvp_pin, kvp_unpin
 *
 * The authority's word has one writer and is read afresh (invalidate, fence, load). "Cut off" means that no store of
 * the host arrives any more; its processes live on, and reboot before they are let in again. What such a zombie
 * reads in place from its own pool is not protected here: a fence must also end its reads, or end the host.
 *
 * Checked: assertions, and that no run ends with the adopter waiting. SHOW_REUSE fails where an adopter has reused
 * the block, so that the others are known to get that far. Mutations, which must each make it fail:
 *   ADOPT_AT_EXPIRY        a survivor adopts when it sees the lease expired
 *   CONFIRM_BEFORE_RESET   the fence names the adopter first and resets afterwards
 *   NO_INVALIDATE          the adopter keeps what it had cached of the segment
 *   IGNORE_PINS_AT_EXPIRY  an owner does not count the pins of a host whose lease it sees expired
 *   TWO_ADOPTERS           the fence is confirmed without a name: each survivor adopts
 *   NO_EPOCH               the adopter goes on with the generations of the lost host
 *   SAME_EPOCH             two hosts may take the same epoch (highest seen + 1)
 *   NO_PIN_CHECK           the adopter frees blocks that it finds EVICTING or OWN without looking at pins
 *   NO_STALE_CHECK         a host publishes without looking whether it was fenced
 *   RESTART_UNNAMED        a restarted host takes its old segment without having been named
 *   RENAME_EARLY           the fence names another adopter before the first has adopted or was fenced itself
 *   COUNT_FENCED_PINS      pins of a fenced incarnation count for ever (the adopter can never reuse)
 */
#define A 0
#define B 1
#define C 2
#define NOBODY 3
#define HOSTS 3
#ifndef PUBLICATIONS
#define PUBLICATIONS 2 /* of A, per incarnation */
#endif
#ifndef PINS
#define PINS 1 /* of each reader */
#endif
#ifndef FENCES
#define FENCES 1 /* of A while it is up */
#endif
#ifndef LOSSES
#define LOSSES 1 /* of power at A */
#endif
#ifndef BOOTS
#define BOOTS 1 /* of A after a loss or a fence */
#endif

/* The word of the block: {epoch, generation, state}. A reference is its {epoch, generation}. */
#define FREE 0
#define OWN 1
#define LIVE 2
#define EVICTING 3
#define FIRST_EPOCH 3
#define WORD(epoch, generation, state) ((epoch) * 32 + (generation) * 4 + (state))
#define STATE(word) ((word) & 3)
#define REFERENCE(word) ((word) >> 2)
#define GENERATION(word) (((word) >> 2) & 7)
#define WITH(word, state) (((word) & ~3) | (state))

/* Pool memory, and what each host has of it in its cache. */
short word, word_copy[HOSTS];
byte payload, payload_copy[HOSTS];
bool word_cached[HOSTS], word_dirty[HOSTS], payload_cached[HOSTS], payload_dirty[HOSTS];
byte pin[HOSTS];                   /* the incarnation whose pin stands, 0: none; written back as it is written */
byte row[HOSTS];                   /* the owner row of each host: an epoch; the highest names the owner */
byte fenced, named = NOBODY;       /* the authority's word: A is dead up to this incarnation, and who adopts for it */

/* What is so, whether anybody knows it or not. */
byte incarnation[HOSTS];           /* of each host: one for each boot */
byte epoch[HOSTS];                 /* under which this host publishes: what it has written to its row, or meant to */
bool up[HOSTS], cut[HOSTS];        /* does it run? is it cut off? */
bool pinned[HOSTS];                /* a valid pin: the word fitted after the pin was raised */
byte owner = A, owner_since = 1;   /* the last host that took the segment, and its incarnation then */
bool answered = true;              /* who was named has adopted, or found that there was nothing to adopt */
#define sees_expired true          /* any host may be slow for any time: its lease may be seen expired at any moment */
byte known, known_tag;             /* the last publication that was LIVE in some cache, and its own bytes */

#define runs(host, number) (up[host] && incarnation[host] == (number))
#define owns_by_rows(host) (row[host] >= row[A] && row[host] >= row[B] && row[host] >= row[C])

/* Lines. A host that was cut off writes back into nothing. */
inline write_back_word(host) {
    if
    :: word_dirty[host] && !cut[host] -> assert(owner == host); word = word_copy[host]
    :: else
    fi;
    word_dirty[host] = false
}
inline write_back_payload(host) {
    if
    :: payload_dirty[host] && !cut[host] -> assert(owner == host); payload = payload_copy[host]
    :: else
    fi;
    payload_dirty[host] = false
}
inline drop_word(host) { word_cached[host] = false; word_copy[host] = 0; word_dirty[host] = false }
inline drop_payload(host) { payload_cached[host] = false; payload_copy[host] = 0; payload_dirty[host] = false }
inline invalidate(host) { /* of a line that this host has dirty: the CPU writes it back first */
    write_back_word(host); write_back_payload(host); drop_word(host); drop_payload(host)
}
inline fetch_word(host) {
    if :: !word_cached[host] -> word_copy[host] = word; word_cached[host] = true :: else fi
}
inline fetch_payload(host) {
    if :: !payload_cached[host] -> payload_copy[host] = payload; payload_cached[host] = true :: else fi
}
inline store_word(host, value) {
    word_copy[host] = value; word_cached[host] = true; word_dirty[host] = true
}
inline store_payload(host, value) {
    payload_copy[host] = value; payload_cached[host] = true; payload_dirty[host] = true
}
inline lose_cache(host) { /* a reset: each dirty line reaches memory or does not */
    if :: word_dirty[host] -> write_back_word(host) :: true fi;
    if :: payload_dirty[host] -> write_back_payload(host) :: true fi;
    drop_word(host); drop_payload(host)
}

/* What the caches do by themselves. */
proctype caches() {
end:
    do
    :: atomic { word_dirty[A] -> write_back_word(A) }
    :: atomic { payload_dirty[A] -> write_back_payload(A) }
    :: atomic { word_dirty[B] -> write_back_word(B) }
    :: atomic { payload_dirty[B] -> write_back_payload(B) }
    :: atomic { word_dirty[C] -> write_back_word(C) }
    :: atomic { payload_dirty[C] -> write_back_payload(C) }
    :: atomic { word_cached[A] && !word_dirty[A] -> drop_word(A) }
    :: atomic { payload_cached[A] && !payload_dirty[A] -> drop_payload(A) }
    od
}

/* Which pins count for an owner: all but those of incarnations that are known dead. A lapsed lease changes nothing. */
#ifdef COUNT_FENCED_PINS
#define counts(whose) (pin[whose] != 0)
#else
#define counts(whose) (pin[whose] != 0 && pin[whose] == incarnation[whose] && (whose != A || pin[A] > fenced))
#endif
#define any_pin (counts(A) || counts(B) || counts(C))
#ifdef IGNORE_PINS_AT_EXPIRY
#define look_at_pins if :: free = !any_pin :: sees_expired -> free = true fi
#else
#define look_at_pins free = !any_pin
#endif

/* The block is about to get new bytes: no valid pin of a live host may stand. (One that was cut off changes none.) */
inline take(host) {
    assert(cut[host] || (!pinned[B] && !pinned[C] && (!pinned[A] || cut[A])));
    store_word(host, WITH(word_copy[host], OWN))
}

/* Make the block one's own: a FREE one at once; a LIVE one by EVICTING in memory, then a look at all pins. */
inline evict(host) {
    atomic {
        fetch_word(host);
        if
        :: STATE(word_copy[host]) == FREE -> take(host)
        :: STATE(word_copy[host]) == LIVE -> store_word(host, WITH(word_copy[host], EVICTING)); write_back_word(host)
        :: else
        fi
    }
    atomic {
        fetch_word(host);
        if
        :: STATE(word_copy[host]) == EVICTING ->
            look_at_pins;
            if
            :: free -> take(host)
            :: else -> store_word(host, WITH(word_copy[host], LIVE)); write_back_word(host)
            fi
        :: else
        fi;
        free = false
    }
}

/* Publish in a block of one's own: bytes and their write-back; fence; LIVE; write-back. Between the last two a
 * worker of this host may find the block in the host's cache and tell its reference to anybody. */
#ifdef NO_EPOCH
#define stamp(host) FIRST_EPOCH
#else
#define stamp(host) epoch[host]
#endif
inline publish(host, number) {
    atomic { bytes = 16 * host + 4 * number + left; store_payload(host, bytes) }
    atomic {
        write_back_payload(host); fetch_word(host);
        store_word(host, WORD(stamp(host), GENERATION(word_copy[host]) + 1, LIVE));
        known = REFERENCE(word_copy[host]); known_tag = bytes; bytes = 0
    }
    atomic { write_back_word(host) }
}

/* Put in order what the last owner left. With its cache lost, EVICTING or OWN in memory may be older than a pin. */
inline settle(host) {
    atomic {
        fetch_word(host);
        if
        :: STATE(word_copy[host]) == EVICTING || STATE(word_copy[host]) == OWN ->
#ifndef NO_PIN_CHECK
            !any_pin;
#endif
            fetch_word(host);
            store_word(host, WITH(word_copy[host], FREE))
        :: else
        fi
    }
}

/* Take the segment of a lost host: nothing of it from one's own cache, then a higher owner epoch in one's own row.
 * An epoch says whose it is, as a ballot does: a host that was cut off while it adopted cannot have used the same. */
#ifdef SAME_EPOCH
#define epoch_after(epoch, host) ((epoch) + 1)
#else
#define epoch_after(epoch, host) ((epoch) - (epoch) % HOSTS + HOSTS + (host))
#endif
inline adopt(host, number) {
#ifndef NO_INVALIDATE
    atomic { invalidate(host) }
#endif
    /* Rows of others are read first, one's own is written later: only the name keeps two from doing it at once. */
    atomic { if :: owns_by_rows(A) -> adopted = true; epoch[host] = epoch_after(row[A], host) :: else fi }
    atomic {
        if
        :: adopted && !cut[host] ->
            assert(!runs(owner, owner_since) || cut[owner]);
            row[host] = epoch[host]; owner = host; owner_since = number
        :: else /* nothing to adopt; or cut off, and it does not know */
        fi;
        if :: !cut[host] -> answered = true :: else fi
    }
}

/* Publish in the adopted block, whatever is in it; waits for pins that count, and for nothing else. */
inline reuse(host) {
    settle(host);
    do
    :: evict(host);
        if
        :: STATE(word_copy[host]) == OWN -> break
        :: else -> !any_pin
        fi
    od;
    publish(host, 1)
#ifdef SHOW_REUSE
    ;assert(false)
#endif
}

/* A survivor: sees the lease expire, and adopts when it is named. */
proctype survivor(byte host) {
    bool free, adopted;
    byte answered_for, bytes, left;
end:
    do
#if defined(ADOPT_AT_EXPIRY)
    :: atomic { sees_expired && answered_for == 0 -> answered_for = 1 };
#elif defined(TWO_ADOPTERS)
    :: atomic { fenced > answered_for -> answered_for = fenced };
#else
    :: atomic { fenced > answered_for && named == host -> answered_for = fenced };
#endif
        adopt(host, 1);
        if :: adopted -> reuse(host); adopted = false :: else fi
    od
}

/* A worker that reads in place: raise the pin, refresh the lines if the owner is another host, check the word. */
#define right_bytes(host) (cut[host] || payload_copy[host] == tag)
inline read_in_place(host, number) {
    atomic {
        known != 0 -> reference = known; tag = known_tag;
        if :: !cut[host] -> pin[host] = number :: else fi
    }
    atomic {
        if :: !owns_by_rows(host) -> invalidate(host) :: else fi;
        fetch_payload(host)
    }
    atomic {
        fetch_word(host);
        if
        :: REFERENCE(word_copy[host]) == reference && STATE(word_copy[host]) == LIVE ->
            fetch_payload(host); pinned[host] = true; assert(right_bytes(host))
        :: else
        fi
    }
    atomic {
        if
        :: pinned[host] -> /* the line may have left the cache meanwhile */
            write_back_payload(host); drop_payload(host); fetch_payload(host); assert(right_bytes(host));
            pinned[host] = false
        :: else
        fi;
        if :: !cut[host] -> pin[host] = 0 :: else fi;
        reference = 0; tag = 0
    }
}
proctype reader(byte host) {
    byte reference, tag, left = PINS;
end:
    do
    :: atomic { left > 0 && known != 0 -> left-- }
        read_in_place(host, 1)
    od
}

/* Is my incarnation fenced? Asked before each publication; after a yes every verb refuses. */
#ifdef NO_STALE_CHECK
#define is_stale (false)
#else
#define is_stale (fenced >= number)
#endif

/* Host A, from one boot to the next. Its first incarnation owns the segment; a later one has lost its cache, so it
 * stands to its own old segment as a survivor does: it takes the segment if the authority names it, and not
 * otherwise. */
proctype host_a(byte number) {
    byte left = PUBLICATIONS, reference, tag, bytes;
    bool free, adopted = (number == 1);
    {
        if
        :: number == 1 ->
#ifdef FEW_PINS
            skip
#else
            if :: pin[A] = number :: skip fi /* a pin that nobody will ever lower */
#endif
        :: number > 1 ->
#ifndef RESTART_UNNAMED
            (fenced >= number - 1 || !owns_by_rows(A));
            if
            :: fenced == number - 1 && named == A -> adopt(A, number)
            :: else
            fi;
#else
            adopt(A, number);
#endif
            if :: adopted -> settle(A) :: else -> read_in_place(A, number); left = 0 fi
        fi;
        do
        :: left == 0 -> break
        :: left > 0 ->
            atomic {
                left--;
                if :: is_stale -> break :: else fi;
                assert(fenced < number)
            }
            evict(A);
            if
            :: STATE(word_copy[A]) == OWN -> publish(A, number)
            :: else
            fi
        od
    } unless { !runs(A, number) }
}

/* The authority: one at a time it makes sure that A is dead, then names who adopts. A host that comes back asks it
 * too. It names nobody anew until the last who was named has answered, or is what it has just fenced. */
#ifdef RENAME_EARLY
#define may_name true
#else
#define may_name (answered || named == A)
#endif
inline stop_a(target) {
    atomic {
        if
        :: incarnation[A] == target && up[A] && !cut[A] -> lose_cache(A); up[A] = false; pinned[A] = false
        :: incarnation[A] == target && up[A] && !cut[A] -> cut[A] = true
        :: else
        fi
    }
}
inline name(host, target) { atomic { fenced = target; named = host; answered = false } }
proctype authority() {
    byte target, left = FENCES, choice, fences;
end:
    do
    :: atomic {
            sees_expired && incarnation[A] > fenced && may_name && (left > 0 || !up[A]) ->
            if :: up[A] -> left-- :: else fi; /* a host that is merely slow is fenced FENCES times, a lost one always */
            target = incarnation[A];
            choice = B; /* which of the two is first does not matter: they are the same */
            if :: fences > 0 -> choice = C :: true fi;
            fences++
        }
#ifdef CONFIRM_BEFORE_RESET
        name(choice, target); stop_a(target);
#else
        stop_a(target); name(choice, target);
#endif
        choice = 0; target = 0
    :: atomic { up[A] && fenced < incarnation[A] - 1 && owns_by_rows(A) && may_name -> target = incarnation[A] - 1 }
        name(A, target);
        target = 0
    od
}

/* Power is lost, and comes back sooner than any lease expires, or later. A host that was cut off must reboot. */
proctype power() {
    byte losses = LOSSES, boots = BOOTS;
end:
    do
    :: atomic { losses > 0 && up[A] && !cut[A] -> losses--; lose_cache(A); up[A] = false; pinned[A] = false }
    :: atomic {
            boots > 0 && (!up[A] || cut[A]) -> boots--;
            drop_word(A); drop_payload(A); pinned[A] = false; cut[A] = false; up[A] = true;
            incarnation[A]++; run host_a(incarnation[A])
        }
    od
}

init {
    atomic {
        row[A] = FIRST_EPOCH; epoch[A] = FIRST_EPOCH; word = WORD(FIRST_EPOCH, 0, FREE);
        incarnation[A] = 1; incarnation[B] = 1; incarnation[C] = 1; up[A] = true; up[B] = true; up[C] = true;
        run caches(); run authority(); run power();
        run survivor(B); run survivor(C); run host_a(1);
#ifndef FEW_PINS
        run reader(B);
#endif
        run reader(C)
    }
}
